"""The system under chaos: every real process of a tiny run, with a proxy on each connection between two of them.

Each process has a run file of its own, which differs from the others' only in the addresses that it dials.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import redis

from sao.config import RunConfig, dump_run_config, load_run_config
from sao.redis_client import RunKeys
from sao.rows import UpdateRow, read_rows
from sao.supervisor import initial_model
from sao.supervisor.plan import Service, plan, with_ports
from sao.supervisor.ports import PortChooser
from sao.supervisor.process import inherited_environment
from tests.chaos.acknowledgements import AnswerReader
from tests.chaos.fleet import Fleet
from tests.chaos.proxy import Link, Proxies, Watcher

ENGINE = "engine-0"
OURS = ("trainer", "ingest", "reward", "weights", "worker")

SETTINGS = (
    'run.name="chaos"',
    "run.updates=1000000",  # the harness says when it is over
    'redis.appendfsync="always"',
    # Deadlines below the length of a fault, so that every fault runs into them ...
    "redis.timeout_s=2.0",
    "ingest.lease_ttl_s=6.0",
    "ingest.episode_deadline_s=30.0",
    "rollout.turn_timeout_s=5.0",
    "reward.claim_idle_s=5.0",
    "reward.component_timeout_s=5.0",
    "weights.step_timeout_s=5.0",
    # ... and checkpoints often enough for a fault to fall between two, but far enough apart for work to be undone.
    "checkpoint.every_updates=10",
    "checkpoint.starved_after_s=3.0",
    "checkpoint.keep_last=4",
    "checkpoint.keep_every=0",
)


class System:
    """Processes, links and what can be seen of them."""

    def __init__(self, folder: Path, seed: int, note: Callable[[str, str], None]) -> None:
        self.folder = folder
        self.ledger_file = folder / "acknowledged.jsonl"
        self.rows_file = folder / "updates.jsonl"
        for name in ("config", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        asked = load_run_config(None, [*SETTINGS, f"run.seed={seed}", f'run.dir="{folder}"'], env={}, preset="tiny")
        self.config = with_ports(asked, PortChooser())
        self.keys = RunKeys(self.config.run.name)
        self.proxies = Proxies()
        self.links = self._links()
        self._rows_end = 0
        self.rows = 0
        self.last_row: UpdateRow | None = None
        starts = folder / "starts"
        earlier = int(starts.read_text()) if starts.exists() else 0
        starts.write_text(str(earlier + 1))
        self.fleet = Fleet(self._services(earlier), folder / "logs", earlier, note)

    def _links(self) -> dict[str, Link]:
        """One for each pair of processes that talk."""
        ingest_port, engine_port = _port(self.config.ingest.target), _port(self.config.engine.urls[0])
        self._ledger = self.ledger_file.open("a", encoding="utf-8", buffering=1)
        links = {
            "worker-ingest": self.proxies.link(ingest_port, self._watch_answers),
            "worker-engine": self.proxies.link(engine_port),
            "weights-engine": self.proxies.link(engine_port),
        }
        return links | {f"{name}-valkey": self.proxies.link(self.valkey_port) for name in OURS}

    def _watch_answers(self) -> Watcher:
        """Keep what ingest tells the worker, before the worker can know it."""
        reader = AnswerReader()

        def watch(data: bytes) -> None:
            for answer in reader.feed(data):
                line = {"at_s": time.time(), "trajectory": answer.trajectory_id, "status": answer.status}
                self._ledger.write(json.dumps(line) + "\n")

        return watch

    @property
    def valkey_port(self) -> int:
        """Of the server itself."""
        return _port(self.config.redis.url.rpartition("/")[0])

    def run_file(self, name: str) -> Path:
        """Of one process."""
        return self.folder / "config" / f"{name}.toml"

    def write_run_file(self, name: str, config: RunConfig) -> None:
        """Have a process read this, its addresses replaced by its own links, at its next start."""
        urls = {"worker": "worker-engine", "weights": "weights-engine"}
        engines = [f"http://127.0.0.1:{self.links[urls[name]].port}"] if name in urls else config.engine.urls
        valkey = f"redis://127.0.0.1:{self.links[f'{name}-valkey'].port}/0"
        target = f"127.0.0.1:{self.links['worker-ingest'].port}"
        seen = config.model_copy(
            update={
                "redis": config.redis.model_copy(update={"url": valkey}),
                "engine": config.engine.model_copy(update={"urls": engines}),
                "ingest": config.ingest.model_copy(update={"target": target}),
            }
        )
        self.run_file(name).write_text(dump_run_config(seen), encoding="utf-8")

    def _services(self, earlier_starts: int) -> list[Service]:
        for name in OURS:
            self.write_run_file(name, self.config)
        (self.folder / "run.toml").write_text(dump_run_config(self.config), encoding="utf-8")
        model = initial_checkpoint(self.folder / "run.toml", self.folder / "logs" / "warm-start.log")

        def planned(run_file: Path) -> dict[str, Service]:
            made = plan(self.config, run_file, model, own_engines=True, earlier_starts=earlier_starts)
            return {service.name: service for service in made}

        common = planned(self.folder / "run.toml")
        return [planned(self.run_file(name))[name] if name in OURS else service for name, service in common.items()]

    def valkey(self) -> redis.Redis:
        """A client to the server itself, past every link."""
        return redis.Redis(port=self.valkey_port, socket_timeout=5.0, socket_connect_timeout=5.0)

    def put_preference_again(self) -> int:
        """Store the current preference once more; its new version."""
        url = f"http://127.0.0.1:{self.config.reward.port}/v1/preferences"
        current = httpx.get(url, timeout=5.0).raise_for_status().json()["document"]
        version: int = httpx.put(url, json=current, timeout=5.0).raise_for_status().json()["version"]
        return version

    def look(self) -> None:
        """Take in the rows that the trainer has written since the last look."""
        for row, end in read_rows(self.rows_file, self._rows_end):
            self._rows_end, self.last_row = end, row
            self.rows += 1

    def trained_since(self, moment_s: float) -> bool:
        """Whether an update was finished after this Unix time."""
        self.look()
        return self.last_row is not None and self.last_row.finished_s > moment_s

    def claimed(self) -> bool:
        """Whether a trainer holds the store: one that was emptied is nobody's until all that it lost is named."""
        with self.valkey() as client:
            try:
                return bool(client.hexists(self.keys.board, "epoch"))
            except redis.RedisError:
                return False

    @property
    def update(self) -> int:
        """Policy updates made."""
        return self.last_row.update if self.last_row is not None else 0

    def close(self) -> list[int]:
        """End every process and link; the pids that are left."""
        left = self.fleet.stop()
        self.proxies.close()
        self._ledger.close()
        return left


def initial_checkpoint(run_file: Path, log: Path) -> Path:
    """The tiny model's warm start; made here when the cache lacks it, which takes a minute."""
    path, there = initial_model.locate(run_file)
    if not there:
        command = initial_model.warm_start_command(run_file, log)
        with log.open("ab") as output:
            env = inherited_environment() | dict(command.env)
            subprocess.run(command.argv, stdout=output, stderr=output, env=env, check=True, timeout=900)
    return path


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
