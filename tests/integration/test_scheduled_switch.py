"""A switch that waits while services are killed and the store loses everything: it takes effect, once."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import redis

from sao.config import RunConfig, dump_run_config
from sao.redis_client import RunKeys
from sao.tasks.writing import Writing
from tests.support.processes import free_port, wait_until
from tests.support.services import service
from tests.support.stores import claim

URL = "/v1/preferences"


@contextlib.contextmanager
def replica(config: RunConfig, folder: Path, number: int) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """One of the run's reward services, and where it serves preferences; killed at the end."""
    reward = config.reward.model_copy(update={"port": free_port(), "consumer": f"reward-{number}"})
    task = config.task.model_copy(update={"name": "writing"})
    own = config.model_copy(update={"reward": reward, "task": task})
    path = folder / f"reward-{number}.toml"
    path.write_text(dump_run_config(own))
    with service("services.reward", reward.port, own, path, folder / f"reward-{number}.log") as process:
        yield process, f"http://127.0.0.1:{reward.port}{URL}"


def version(url: str) -> int:
    found: int = httpx.get(url, timeout=10).json().get("version", 0)
    return found


def lines(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run.dir / "preferences" / "audit.jsonl").read_text().splitlines()]


def test_a_switch_outlives_its_service_and_its_store_and_takes_effect_once(
    run_config: RunConfig, tmp_path: Path
) -> None:
    document = Writing().preferences["classical"].model_dump(mode="json")
    keys = RunKeys(run_config.run.name)
    with redis.Redis.from_url(run_config.redis.url) as store, replica(run_config, tmp_path, 0) as (_, url):
        with replica(run_config, tmp_path, 1) as (other, other_url):
            waits = httpx.post(f"{other_url}/schedule", json={"document": document, "at_update": 3}, timeout=10)
            assert waits.status_code == httpx.codes.CREATED
            assert httpx.post(f"{other_url}:hold", params={"author": "ann"}, timeout=10).status_code == httpx.codes.OK
            other.kill()
        found: list[str] = [key.decode() for key in store.keys(f"*{{{run_config.run.name}}}*")]
        store.delete(*found)
        claim(store, keys)
        wait_until(lambda: version(url) == 1, timeout_s=20, what="the preference to come back")
        assert httpx.get(f"{url}/hold", timeout=10).json()["author"] == "ann"
        assert [one["id"] for one in httpx.get(f"{url}/schedule", timeout=10).json()["scheduled"]] == [2]
        trainer = {"epoch": 1, "update": 3, "version": "v1", "consumed": 3, "state": "training"}
        store.hset(keys.board, "trainer", json.dumps(trainer))
        assert httpx.post(f"{url}:resume", timeout=10).status_code == httpx.codes.OK
        with replica(run_config, tmp_path, 2) as (_, third_url):
            wait_until(lambda: version(third_url) == 2, timeout_s=20, what="the switch to take effect")
            assert httpx.get(third_url, timeout=10).json() == httpx.get(url, timeout=10).json()
            assert httpx.put(url, json=document, timeout=10).json()["version"] == 3
    assert [(line["seq"], line["what"]) for line in lines(run_config)] == [
        (1, "initial"),
        (2, "schedule"),
        (3, "hold"),
        (4, "resume"),
        (5, "apply"),
        (6, "put"),
    ]
