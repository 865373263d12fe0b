"""The services under fuzz, real processes over a real Valkey, and what must hold when all was sent."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from redis import asyncio as aioredis

from sao.config import RunConfig, dump_run_config, load_run_config
from sao.invariants import Limits
from sao.redis_client import RunKeys
from sao.streams.base import StreamName
from services.rollout.ingest.app import limits_for
from tests.support.ingest import VOCAB
from tests.support.processes import free_port
from tests.support.services import first_version, service
from tests.support.trajectories import ROUTING
from tests.support.valkey import valkey
from tests.support.waiting import eventually

TOKEN = "right"
GROWTH_MIB = 64
"""A process may hold this much more memory at the end than when it was ready."""
SERVICES = {"ingest": "services.rollout.ingest", "reward": "services.reward", "weights": "services.weights"}


@dataclass
class World:
    """Running services, and what they were asked to keep."""

    config: RunConfig
    limits: Limits
    folder: Path
    processes: dict[str, psutil.Process]
    redis: aioredis.Redis
    accepted: set[str] = field(default_factory=set)
    """Ids that ingest said are durable."""
    problems: list[str] = field(default_factory=list)
    _began: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = {name: process.memory_info().rss for name, process in self.processes.items()}

    @property
    def ports(self) -> dict[str, int]:
        """Of HTTP: REST, or telemetry where there is no more."""
        return http_ports(self.config)

    def growth_mib(self) -> dict[str, float]:
        """Resident memory of each process, more than when it was ready."""
        return {
            name: round((process.memory_info().rss - self._began[name]) / 2**20, 1)
            for name, process in self.processes.items()
        }

    async def check(self) -> None:
        """Alive and ready, nothing lost or added, no traceback, memory within bounds; what is not is a problem."""
        for name, port in self.ports.items():
            if not self.processes[name].is_running() or self.processes[name].status() == psutil.STATUS_ZOMBIE:
                self.problems.append(f"{name} has ended:\n{self.log(name)[-2000:]}")
                continue
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
                for path in ("/healthz", "/readyz"):
                    answer = await client.get(path)
                    if answer.status_code != httpx.codes.OK:
                        self.problems.append(f"{name} {path}: {answer.status_code} {answer.text}")
            self.problems += self._told(name)
        for name, grown in self.growth_mib().items():
            if grown > GROWTH_MIB:
                self.problems.append(f"{name} holds {grown} MiB more than when it was ready")
        await eventually(self._scored, what="every accepted trajectory to be scored or buried", timeout_s=60)
        kept = await self._ids(RunKeys(self.config.run.name).stream(StreamName.SCORED), self._dead)
        if kept != self.accepted:
            lost, strange = sorted(self.accepted - kept), sorted(kept - self.accepted)
            self.problems.append(f"accepted and not there: {lost[:5]}; there and never accepted: {strange[:5]}")

    def log(self, name: str) -> str:
        """Everything that the process wrote."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    @property
    def _dead(self) -> str:
        return RunKeys(self.config.run.name).dead

    async def _scored(self) -> bool:
        return await self.redis.xlen(RunKeys(self.config.run.name).stream(StreamName.TRAJECTORIES)) == 0

    async def _ids(self, *streams: str) -> set[str]:
        entries: list[Any] = [entry for key in streams for entry in await self.redis.xrange(key) or []]
        return {fields[b"_id"].decode() for _, fields in entries}

    def _told(self, name: str) -> Iterator[str]:
        """Lines that no log should hold: tracebacks, errors, and what is not JSON."""
        for line in self.log(name).splitlines():
            try:
                event: dict[str, Any] = json.loads(line)
            except ValueError:
                yield f"{name} wrote {line[:500]}"
                continue
            buried = event.get("event") == "trajectory buried"  # a whole rollout that broke off is no failure
            if "exception" in event or (event.get("level") in {"error", "critical"} and not buried):
                yield f"{name} logged {line[:2000]}"


def http_ports(config: RunConfig) -> dict[str, int]:
    """Where each service answers HTTP."""
    return {"ingest": config.ingest.metrics_port, "reward": config.reward.port, "weights": config.weights.port}


@contextlib.asynccontextmanager
async def services(folder: Path, *, replay: bool) -> AsyncIterator[World]:
    """The world in an empty folder, ready; with `replay` a trajectory needs its routed experts, else it has none."""
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(valkey(folder, "--maxmemory", "512mb", "--maxmemory-policy", "noeviction"))
        config = _config(folder, url, replay=replay)
        await first_version(config, folder)
        path = folder / "run.toml"
        path.write_text(dump_run_config(config))
        processes = {}
        for name, module in SERVICES.items():
            started = service(module, http_ports(config)[name], config, path, folder / f"{name}.log")
            processes[name] = psutil.Process(stack.enter_context(started).pid)
        redis = aioredis.Redis.from_url(url)
        try:
            limits = limits_for(config, VOCAB, ROUTING if replay else None)
            yield World(config, limits, folder, processes, redis)
        finally:
            await redis.aclose()


def _config(folder: Path, url: str, *, replay: bool) -> RunConfig:
    ports = [free_port() for _ in range(4)]
    sets: Sequence[str] = [
        "run.name=fuzz",
        f'run.dir="{folder / "run"}"',
        f'redis.url="{url}"',
        f"auth.token={TOKEN}",
        f"trainer.routing_replay={str(replay).lower()}",
        f"ingest.port={ports[0]}",
        f"ingest.target=127.0.0.1:{ports[0]}",
        f"ingest.metrics_port={ports[1]}",
        "ingest.max_message_mb=1",
        "ingest.max_tokens=512",
        f"reward.port={ports[2]}",
        "reward.claim_idle_s=0.5",
        "reward.max_deliveries=2",
        f"weights.port={ports[3]}",
        'engine.urls=["http://127.0.0.1:9"]',
    ]
    return load_run_config(None, sets, env={})
