"""Feed the services, and measure between two thousands, when everything is settled, what they hold."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from redis import asyncio as aioredis

from sao.config import RunConfig, dump_run_config, load_run_config
from sao.ids import uuid7
from sao.redis_client import RunKeys
from sao.streams.base import StreamName
from sao.supervisor.valkey import valkey_command
from sao.v1 import ingest_pb2 as pb
from sao.v1 import trajectory_pb2
from services.rollout.ingest_client import make_stub, open_channel
from tests.support.ingest import VOCAB
from tests.support.processes import free_port, server
from tests.support.services import first_version, service
from tests.support.trajectories import VERSIONS
from tests.support.valkey import answers
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from services.rollout.ingest_client import Stub

STEP = 1000
"""Trajectories between two samples."""
SIZE = 8192
"""Bytes of a trajectory on the wire."""
WORKERS = 16
POOL_SLACK = 16
"""A pool of connections opens one more when more calls meet than ever before, which may still happen."""
SERVICES = {
    "ingest": "services.rollout.ingest",
    "reward": "services.reward",
    "trainer": "bench.soak.null_trainer",
}
_PROCESS_METRICS = {
    "rss": "process_resident_memory_bytes",
    "fds": "process_open_fds",
    "tasks": "sao_process_tasks",
}


@dataclass(frozen=True)
class Sample:
    """What is held after so many trajectories, all of them settled."""

    trajectories: int
    seconds: float
    used_memory: int
    """Of Valkey, in bytes."""
    clients: int
    """Connected to Valkey."""
    keys: int
    rss: Mapping[str, int]
    """Bytes by process."""
    fds: Mapping[str, int]
    tasks: Mapping[str, int]


@dataclass
class Soak:
    """Running services, and who feeds them."""

    config: RunConfig
    stub: Stub
    redis: aioredis.Redis
    templates: Sequence[trajectory_pb2.Trajectory]
    fed: int = 0
    started: float = field(default_factory=time.monotonic)

    async def feed(self, count: int) -> None:
        """Publish so many trajectories, each under a lease, and wait until the trainer has settled them."""
        left = iter(range(count))
        async with asyncio.TaskGroup() as group:
            for number in range(WORKERS):
                group.create_task(self._work(f"worker-{number}", left))
        self.fed += count
        await eventually(self._settled, what=f"{count} trajectories to be settled", timeout_s=120, poll_s=0.05)

    async def _work(self, name: str, left: Iterator[int]) -> None:
        for _ in left:
            lease = await self._lease(name)
            message = trajectory_pb2.Trajectory()
            message.CopyFrom(self.templates[lease.ordinal % len(self.templates)])
            message.id, message.worker_id, message.lease_id = uuid7(), name, lease.lease_id
            message.ordinal, message.sample, message.attempt = lease.ordinal, lease.sample, lease.attempt
            answer = await self.stub.Publish(pb.PublishRequest(trajectory=message), timeout=30)
            if answer.status != pb.PUBLISH_STATUS_ACCEPTED:
                msg = f"trajectory {message.id} of ordinal {lease.ordinal} was answered {answer.status}"
                raise AssertionError(msg)

    async def _lease(self, name: str) -> pb.PromptLease:
        while True:
            answer = await self.stub.LeasePrompts(pb.LeasePromptsRequest(worker_id=name, max_leases=1), timeout=30)
            if answer.leases:
                return answer.leases[0]
            await asyncio.sleep(answer.retry_after_ms / 1000)

    async def _settled(self) -> bool:
        names = RunKeys(self.config.run.name)
        left = [await self.redis.xlen(names.stream(stream)) for stream in StreamName]
        return not any(left) and await self.redis.scard(names.unconsumed) == 0

    async def sample(self) -> Sample:
        """What everybody holds now."""
        scrapes = {name: await _scraped(port) for name, port in http_ports(self.config).items()}
        memory, clients = await self.redis.info("memory"), await self.redis.info("clients")
        return Sample(
            trajectories=self.fed,
            seconds=round(time.monotonic() - self.started, 1),
            used_memory=memory["used_memory"],
            clients=clients["connected_clients"],
            keys=await self.redis.dbsize(),
            **{
                what: {name: _value(text, metric) for name, text in scrapes.items()}
                for what, metric in _PROCESS_METRICS.items()
            },
        )

    async def dead_letters(self) -> int:
        """Trajectories that were not trained."""
        return int(await self.redis.xlen(RunKeys(self.config.run.name).dead))


def http_ports(config: RunConfig) -> dict[str, int]:
    """Where each service answers /metrics."""
    return {
        "ingest": config.ingest.metrics_port,
        "reward": config.reward.port,
        "trainer": config.trainer.metrics_port,
    }


async def _scraped(port: int) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{port}/metrics", timeout=10)).text


def _value(text: str, metric: str) -> int:
    match = re.search(rf"^{metric} (\S+)$", text, re.MULTILINE)
    if match is None:
        msg = f"/metrics has no {metric}"
        raise AssertionError(msg)
    return round(float(match[1]))


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Soak]:
    """Valkey as `sao up` starts it (everysec), ingest, reward and the null trainer, in an empty folder."""
    config = _config(folder)
    port = free_port()
    config = config.model_copy(update={"redis": config.redis.model_copy(update={"url": f"redis://127.0.0.1:{port}/0"})})
    command = valkey_command(config.redis, port, folder / "valkey", folder / "valkey.log")
    with contextlib.ExitStack() as stack:
        stack.enter_context(server(command.argv, log=command.log, ready=lambda: answers(port), timeout_s=15))
        await first_version(config, folder)
        path = folder / "run.toml"
        path.write_text(dump_run_config(config))
        for name, module in SERVICES.items():
            stack.enter_context(service(module, http_ports(config)[name], config, path, folder / f"{name}.log"))
        redis = aioredis.Redis.from_url(config.redis.url)
        try:
            async with open_channel(config) as channel:
                yield Soak(config, make_stub(channel), redis, list(map(_template, range(32))))
        finally:
            await redis.aclose()


def _config(folder: Path) -> RunConfig:
    ingest, *ports = (free_port() for _ in range(4))
    sets = [
        "run.name=soak",
        f'run.dir="{folder / "run"}"',
        "redis.appendfsync=everysec",
        f"ingest.port={ingest}",
        f"ingest.target=127.0.0.1:{ingest}",
        f"ingest.metrics_port={ports[0]}",
        f"reward.port={ports[1]}",
        f"trainer.metrics_port={ports[2]}",
        "trainer.trajectories_per_update=16",
    ]
    return load_run_config(None, sets, env={})


def _template(seed: int) -> trajectory_pb2.Trajectory:
    """A calculation that is talked about for SIZE bytes."""
    rng = random.Random(seed)
    message = trajectory_pb2.Trajectory(
        id=uuid7(),
        run="soak",
        task="calculator",
        prompt_id=f"p{seed}",
        prompt_token_ids=[rng.randrange(VOCAB) for _ in range(8)],
        segments=[
            _action(rng, 16),
            trajectory_pb2.Segment(kind=trajectory_pb2.SEGMENT_KIND_OBSERVATION, token_ids=[5] * 8),
        ],
        sampling=trajectory_pb2.SamplingConfig(temperature=1, top_p=1, top_k=-1, repetition_penalty=1),
        finish_reason=trajectory_pb2.FINISH_REASON_STOP,
        engine_id="engine-0",
        worker_id="worker-0",
        turns=[trajectory_pb2.TurnTiming(started_s=1.0, engine_s=0.1)] * 2,
        task_payload_json='{"truth": "+1728"}',
    )
    size = message.ByteSize()
    message.segments.append(_action(rng, (SIZE - size) // 5))
    return message


def _action(rng: random.Random, tokens: int) -> trajectory_pb2.Segment:
    return trajectory_pb2.Segment(
        kind=trajectory_pb2.SEGMENT_KIND_ACTION,
        token_ids=[rng.randrange(VOCAB) for _ in range(tokens)],
        logprobs=[-rng.expovariate(1.0) for _ in range(tokens)],
        versions=[trajectory_pb2.VersionSpan(version=VERSIONS[0], start=0, end=tokens)],
    )


# --- the judgement --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """What may grow, in bytes for each trajectory."""

    valkey: float = 200.0
    process: float = 20.0


def slope(samples: Sequence[Sample], values: Sequence[float]) -> float:
    """Least squares, per trajectory."""
    xs = [sample.trajectories for sample in samples]
    mean_x, mean_y = sum(xs) / len(xs), sum(values) / len(values)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, values, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


def leaks(samples: Sequence[Sample]) -> list[str]:
    """Tasks, files, connections and keys that there are more of at the end than at the beginning."""
    first, last = samples[0], samples[-1]
    found = [
        f"{name} has {after} {what}, it had {before}"
        for what, more in (("fds", POOL_SLACK), ("tasks", 0))
        for name, after in getattr(last, what).items()
        if after > (before := getattr(first, what)[name]) + more
    ]
    # Ids are remembered in a bucket for each hour, and the hour may turn.
    for what, more in (("clients", 2 * POOL_SLACK), ("keys", 1)):
        before, after = getattr(first, what), getattr(last, what)
        if after > before + more:
            found.append(f"Valkey has {after} {what}, it had {before}")
    return found


async def soak(folder: Path, trajectories: int, warm: int, bounds: Bounds | None = None) -> dict[str, Any]:
    """The samples, the slopes after the first `warm` trajectories, and whether they and the leaks are within bounds."""
    bounds = bounds or Bounds()
    async with running(folder) as world:
        samples = [await world.sample()]
        while world.fed < trajectories:
            await world.feed(STEP)
            samples.append(await world.sample())
        dead = await world.dead_letters()
    steady = [sample for sample in samples if sample.trajectories >= warm]
    valkey = slope(steady, [sample.used_memory for sample in steady])
    processes = {name: slope(steady, [sample.rss[name] for sample in steady]) for name in SERVICES}
    leaked = leaks(steady)
    within = valkey <= bounds.valkey and max(processes.values()) <= bounds.process
    return {
        "passed": within and not leaked and dead == 0,
        "trajectories": trajectories,
        "seconds": samples[-1].seconds,
        "bytes_per_trajectory": {"valkey": round(valkey, 1)} | {k: round(v, 2) for k, v in processes.items()},
        "leaks": leaked,
        "dead_letters": dead,
        "samples": [asdict(sample) for sample in samples],
    }
