"""The reward service as its own process, on a real Valkey: score, switch, stop, start again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import sao.board
import sao.streams
from sao.config import RunConfig, dump_run_config
from sao.outcome import Scored
from sao.streams.base import StreamName, TrajectoryStreams
from sao.tasks.base import Prompt
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from sao.tasks.writing import LEXICONS, Writing
from tests.support.processes import free_port, server
from tests.support.rollouts import play
from tests.support.scored_tasks import scored

TASK = Writing()
TOKENIZER = tokenizer_of_run(None, TASK)
TOKEN = "s3cret"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def config(run_config: RunConfig) -> RunConfig:
    reward = run_config.reward.model_copy(update={"port": free_port(), "claim_idle_s": 0.5})
    task = run_config.task.model_copy(update={"name": "writing"})
    return run_config.model_copy(update={"reward": reward, "task": task})


@contextlib.contextmanager
def service(config: RunConfig, folder: Path) -> Iterator[str]:
    """The running process's URL; SIGTERM must end it with 0 within 10 s."""
    path, url = folder / "run.toml", f"http://127.0.0.1:{config.reward.port}"
    path.write_text(dump_run_config(config))

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/readyz", timeout=2.0).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    command = [sys.executable, "-m", "services.reward", "--config", str(path)]
    env = {"SAO__AUTH__TOKEN": TOKEN}
    with server(command, log=folder / "reward.log", ready=ready, timeout_s=60, env=env) as process:
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0, (folder / "reward.log").read_text()


async def write(streams: TrajectoryStreams, style: str, ordinals: range) -> None:
    """Publish texts wholly in one style."""
    for ordinal in ordinals:
        text = " ".join([*LEXICONS[style][:10], "<eos>"])
        made = play(TASK, Prompt("p", "moon", {}), TOKENIZER, [text])
        fields = {"task": "writing", "ordinal": str(ordinal)}
        await streams.append(made.id, made.message.SerializeToString(), ordinal=ordinal, sample=0, fields=fields)


async def test_a_preference_switched_under_load_rules_from_the_next_scoring_on(
    config: RunConfig, tmp_path: Path
) -> None:
    streams = sao.streams.connect(config)
    await streams.open_consumer(StreamName.SCORED, "trainer")
    count = 200
    with service(config, tmp_path) as url:
        async with httpx.AsyncClient(base_url=url, headers=HEADERS) as client:
            feeding = asyncio.ensure_future(write(streams, "cute", range(count)))
            pairs = await scored(streams, count // 4)
            document = TASK.preferences["classical"].model_dump_json()
            response = await client.put("/v1/preferences", content=document, headers={"If-Match": '"1"'})
            answered_s = time.time()
            assert response.json()["version"] == 2
            await feeding
            pairs += await scored(streams, count - len(pairs))
            metrics = (await client.get("/metrics")).text
    outcomes = [outcome for _, outcome in pairs if isinstance(outcome, Scored)]
    assert len(outcomes) == count
    assert all(outcome.scored_under == 2 for outcome in outcomes if outcome.scoring_started_s > answered_s)
    assert {outcome.scored_under for outcome in outcomes} == {1, 2}
    assert all(outcome.value == pytest.approx(1.0 if outcome.scored_under == 1 else 0.0) for outcome in outcomes)
    assert f'sao_reward_outcomes_total{{kind="scored"}} {count}.0' in metrics
    assert "sao_reward_preference_version 2.0" in metrics
    await streams.close()


async def test_a_restart_keeps_the_preference_and_scores_what_was_left(config: RunConfig, tmp_path: Path) -> None:
    streams, board = sao.streams.connect(config), sao.board.connect(config)
    await streams.open_consumer(StreamName.SCORED, "trainer")
    with service(config, tmp_path) as url:
        document = TASK.preferences["chuunibyou"].model_dump_json()
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.put("/v1/preferences", content=document)).status_code == 401
            assert (await client.put("/v1/preferences", content=document, headers=HEADERS)).status_code == 200
    await write(streams, "chuunibyou", range(5))
    # The process died with two deliveries in its hands.
    await streams.open_consumer(StreamName.TRAJECTORIES, config.reward.consumer)
    await streams.read(StreamName.TRAJECTORIES, config.reward.consumer, count=2, block_ms=0)
    with service(config, tmp_path):
        pairs = await scored(streams, 5)
    assert [(o.scored_under, o.value) for _, o in pairs if isinstance(o, Scored)] == [(2, 1.0)] * 5
    assert (await streams.depth(StreamName.TRAJECTORIES)).length == 0
    await streams.close()
    await board.close()


def test_a_preference_for_another_task_ends_the_process_with_the_key(config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(dump_run_config(config) + '\n[preference]\nname = "p"\nweights = { correct = 1.0 }\n')
    command = [sys.executable, "-m", "services.reward", "--config", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "preference: the run file's preference reads ['correct'], task writing computes" in ended.stderr
