"""A store at its mark, and one that is full: real services, a real Valkey of a few MiB, a trainer that settles.

Ingest refuses, everything behind it drains, the worker keeps what it finishes; once there is space all goes on by
itself, with each trajectory settled exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import httpx
import pytest
from redis import asyncio as aioredis
from typer.testing import CliRunner

from sao import board as boards
from sao import streams as trajectory_streams
from sao.cli.main import app
from sao.config import RunConfig, dump_run_config, load_run_config
from sao.redis_client import RunKeys
from sao.streams.base import StreamName, TrajectoryStreams
from sao.supervisor.folder import RunFolder
from sao.v1 import ingest_pb2 as pb
from sao.v1 import trajectory_pb2
from services.rollout.app import spool_folder
from services.rollout.ingest_client import make_stub, open_channel, retry_after_s
from tests.support.crashing_worker import TURN_S, spooled
from tests.support.ingest import VOCAB
from tests.support.processes import free_port
from tests.support.recording_trainer import settled
from tests.support.rollout_worker import write_engine
from tests.support.services import first_version, service
from tests.support.trajectories import LIMITS, VERSIONS, good
from tests.support.valkey import valkey
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from services.rollout.ingest_client import Stub

pytestmark = pytest.mark.timeout(120)

RECOVERY_S = 10.0
"""Longest time from space in the store to work that goes on."""
LARGE, HUGE = (json.dumps({"truth": "+1728", "notes": "x" * size}) for size in (60_000, 600_000))
"""What a task says of trajectories that fill the store, so that nobody has to read many tokens."""
SERVICES = {
    "ingest": "services.rollout.ingest",
    "reward": "services.reward",
    "rollout": "tests.support.crashing_worker",
    "trainer": "tests.support.recording_trainer",
}
TRAJECTORIES, SCORED = StreamName.TRAJECTORIES, StreamName.SCORED


@dataclass
class World:
    """Running services over a small store, and who feeds them beside the worker."""

    config: RunConfig
    stack: contextlib.ExitStack
    stub: Stub
    redis: aioredis.Redis
    streams: TrajectoryStreams
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    leases: list[pb.PromptLease] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    starting: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.config.run.dir

    @property
    def spool(self) -> Path:
        return spool_folder(self.config)

    async def start(self, *names: str) -> None:
        """Start these services at once; they are ready."""
        ports, run_file = http_ports(self.config), RunFolder(self.root).run_file
        starting = [service(SERVICES[name], ports[name], self.config, run_file, self.log(name)) for name in names]
        entering = (asyncio.to_thread(self.stack.enter_context, one) for one in starting)
        for name, started in zip(names, await asyncio.gather(*entering, return_exceptions=True), strict=True):
            if isinstance(started, BaseException):
                raise started
            self.processes[name] = started

    def begin(self, name: str) -> asyncio.Task[None]:
        """Start a service beside what else goes on."""
        self.starting.append(asyncio.create_task(self.start(name)))
        return self.starting[-1]

    def send(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def log(self, name: str) -> Path:
        return self.root / f"{name}.log"

    def logged(self, name: str, event: str) -> list[dict[str, str]]:
        """What a service has logged of this event."""
        lines = (json.loads(line) for line in self.log(name).read_text().splitlines() if line.startswith("{"))
        return [line for line in lines if line["event"].startswith(event)]

    async def lease(self, count: int) -> pb.LeasePromptsResponse:
        request = pb.LeasePromptsRequest(worker_id="feeder", max_leases=count)
        return await self.stub.LeasePrompts(request, timeout=10)

    async def stock(self, count: int) -> None:
        """Lease prompts for the trajectories that are to be fed: at the mark there are none."""
        self.leases += (await self.lease(count)).leases
        assert len(self.leases) == count

    async def publish(self, **changes: str) -> None:
        """Publish a large trajectory under the next lease, the way a worker does; AioRpcError when it is refused."""
        lease = self.leases[-1]
        message = trajectory(self.config.run.name, lease)
        for name, value in changes.items():
            setattr(message, name, value)
        await self.stub.Publish(pb.PublishRequest(trajectory=message), timeout=10)
        self.published.append(message.id)
        self.leases.pop()

    async def fill(self, share: float) -> None:
        """Publish until this much of the store is used."""
        while await self.share() < share:
            await self.publish()

    async def refused(self) -> grpc.aio.AioRpcError:
        """The first refusal: ingest looks at the store's memory ten times a second, and may take some more."""
        for _ in range(20):
            try:
                await self.publish()
            except grpc.aio.AioRpcError as error:
                return error
        return pytest.fail("ingest refuses nothing")

    async def share(self) -> float:
        return await self.streams.memory_fraction()

    async def empty(self, stream: StreamName) -> bool:
        return (await self.streams.depth(stream)).length == 0

    async def metric(self, name: str, series: str) -> float:
        """The value of one series of a service's /metrics; 0 while it has none."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://127.0.0.1:{http_ports(self.config)[name]}/metrics", timeout=5)).text
        values = (float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{series} "))
        return next(values, 0.0)

    async def worker_plays(self) -> None:
        """Return in the middle of the worker's work."""
        series = 'sao_rollout_published_total{status="accepted"}'
        before = await self.metric("rollout", series)

        async def more() -> bool:
            return await self.metric("rollout", series) > before

        await eventually(more, what="the worker to publish", poll_s=0.02)

    async def well(self) -> None:
        """Every service lives and says so."""
        async with httpx.AsyncClient() as client:
            for name, process in self.processes.items():
                assert process.poll() is None, self.log(name).read_text()[-3000:]
                for path in ("healthz", "readyz"):
                    answer = await client.get(f"http://127.0.0.1:{http_ports(self.config)[name]}/{path}", timeout=5)
                    assert answer.status_code == httpx.codes.OK, (name, path, answer.text)

    async def status(self) -> str:
        """What `sao status` prints while a supervisor is at work."""
        with RunFolder(self.root).locked():
            return (await asyncio.to_thread(CliRunner().invoke, app, ["status", str(self.root)])).output

    async def recovers(self, kept: set[str]) -> float:
        """Seconds from space in the store until ingest has taken what the worker kept and what we were refused."""
        space_at = 0.0
        again = asyncio.create_task(self._published_in_time())

        async def taken() -> bool:
            nonlocal space_at
            if not space_at and await self.share() < self.config.redis.back_pressure_at:
                space_at = time.monotonic()
            return bool(space_at) and not kept & spooled(self.spool) and again.done()

        await eventually(taken, what="ingest to take what was kept", timeout_s=40, poll_s=0.02)
        await again
        return time.monotonic() - space_at

    async def kept_something(self) -> bool:
        """Whether the worker plays nothing, and something waits in its spool."""
        return await self.metric("rollout", "sao_rollout_episodes_in_flight") == 0 and bool(spooled(self.spool))

    async def _published_in_time(self) -> None:
        while True:
            try:
                return await self.publish()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                await asyncio.sleep(retry_after_s(error) or 0)

    async def audit(self, kept: set[str]) -> None:
        """After a worker's orderly end everything that ingest took is settled once, what was kept among it, or dead."""
        self.send("rollout", signal.SIGTERM)
        await asyncio.to_thread(self.processes["rollout"].wait, 15)

        async def drained() -> bool:
            return await self.empty(TRAJECTORIES) and await self.empty(SCORED) and await self.streams.unconsumed() == 0

        await eventually(drained, what="everything to be settled", poll_s=0.05)
        dead = [letter.trajectory_id for letter in await self.streams.dead_letters(count=100)]
        ended = [*settled(self.config), *dead]
        assert max(Counter(ended).values()) == 1
        assert set(ended) == await self._accepted()
        assert set(ended) >= kept | set(self.published)
        assert not spooled(self.spool)

    async def _accepted(self) -> set[str]:
        """What ingest remembers; the hour may have turned meanwhile."""
        hour, keys = int(time.time()) // 3600, RunKeys(self.config.run.name)
        found: set[bytes] = await self.redis.sunion([keys.seen(hour - 1), keys.seen(hour)])  # type: ignore[assignment]
        return {one.decode() for one in found}


def http_ports(config: RunConfig) -> dict[str, int]:
    return {
        "ingest": config.ingest.metrics_port,
        "reward": config.reward.port,
        "rollout": config.rollout.metrics_port,
        "trainer": config.trainer.metrics_port,
    }


def trajectory(run: str, lease: pb.PromptLease) -> trajectory_pb2.Trajectory:
    message = good(random.Random(lease.ordinal), replace(LIMITS, run=run, vocab_size=VOCAB), ordinal=lease.ordinal)
    message.task, message.task_payload_json = "calculator", LARGE
    message.finish_reason = trajectory_pb2.FINISH_REASON_STOP
    for segment in message.segments:
        del segment.versions[:]
        if segment.kind == trajectory_pb2.SEGMENT_KIND_ACTION:
            segment.versions.add(version=VERSIONS[0], start=0, end=len(segment.token_ids))
    message.sample, message.attempt, message.lease_id = lease.sample, lease.attempt, lease.lease_id
    return message


@contextlib.asynccontextmanager
async def world(folder: Path, memory: str) -> AsyncIterator[World]:
    """An empty store of this size and a run over it; no service yet."""
    options = ("--maxmemory", memory, "--maxmemory-policy", "noeviction")
    with contextlib.ExitStack() as stack:
        config = _config(folder, stack.enter_context(valkey(folder, *options)))
        config.run.dir.mkdir()
        RunFolder(config.run.dir).run_file.write_text(dump_run_config(config))
        await first_version(config, folder)
        board, streams = boards.connect(config), trajectory_streams.connect(config)
        await write_engine(board, "engine-0", verified=VERSIONS)
        redis = aioredis.Redis.from_url(config.redis.url)
        try:
            async with open_channel(config) as channel:
                run = World(config, stack, make_stub(channel), redis, streams)
                try:
                    yield run
                finally:
                    await asyncio.gather(*run.starting, return_exceptions=True)
        finally:
            await redis.aclose()
            await streams.close()
            await board.close()


def _config(folder: Path, url: str) -> RunConfig:
    ingest = free_port()
    sets = [
        "run.name=full",
        f'run.dir="{folder / "run"}"',
        f'redis.url="{url}"',
        f"ingest.port={ingest}",
        f"ingest.target=127.0.0.1:{ingest}",
        f"ingest.metrics_port={free_port()}",
        "ingest.lease_ttl_s=120",
        f"reward.port={free_port()}",
        f"rollout.metrics_port={free_port()}",
        "rollout.concurrency=16",
        "rollout.publish_attempts=2",
        f"trainer.metrics_port={free_port()}",
        "trainer.trajectories_per_update=16",
        # Far more may be admitted than the store takes: it is memory that runs out here.
        "trainer.max_lag=400",
    ]
    return load_run_config(None, sets, env={})


@pytest.fixture(autouse=True)
def worker_in_the_middle_of_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TURN_S, "0.2")


async def test_at_the_mark_ingest_refuses_the_rest_drains_and_work_goes_on_within_10_s_of_space(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, "12mb") as run:
        trainer = run.begin("trainer")
        await run.start("ingest", "reward", "rollout")
        run.send("rollout", signal.SIGSTOP)
        await run.stock(400)
        await run.fill(0.7)
        await trainer
        run.send("trainer", signal.SIGSTOP)
        await run.fill(0.7)
        run.send("rollout", signal.SIGCONT)
        await run.worker_plays()

        # The last one carries the store well past the mark: used memory goes up and down with each call's buffers.
        await run.fill(0.76)
        await run.publish(task_payload_json=HUGE)
        refusal = await run.refused()
        assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (retry_after_s(refusal) or 0) > 0
        answer = await run.lease(1)
        assert (answer.admission, list(answer.leases)) == (pb.ADMISSION_STATE_BACK_PRESSURE, [])
        assert answer.retry_after_ms > 0

        # The worker rests with what it has finished, and the reward service goes on.
        await eventually(lambda: run.empty(TRAJECTORIES), what="the reward service to drain", poll_s=0.02)
        await eventually(run.kept_something, what="the worker to keep what it has", poll_s=0.02)
        kept = spooled(run.spool)
        assert await run.share() >= run.config.redis.back_pressure_at
        # The trainer may have settled some before it was stopped, the newest of them before it could write that down.
        gone = len(settled(run.config)) + run.config.trainer.trajectories_per_update
        assert (await run.streams.depth(SCORED)).length >= len(run.published) - gone

        async def told() -> bool:
            return await run.metric("ingest", 'sao_ingest_store_pressure{state="mark"}') == 1

        await eventually(told, what="ingest to say so", poll_s=0.05)
        assert 0 < await run.metric("ingest", "sao_ingest_store_pressure_since_seconds") <= time.time()
        (line,) = run.logged("ingest", "store at its mark")
        assert "the trainer does not keep up" in line["do"]
        assert not run.logged("ingest", "trajectory refused")
        status = await run.status()
        assert "STORE AT " in status
        assert "the trainer does not keep up" in status

        run.send("trainer", signal.SIGCONT)
        assert await run.recovers(kept) <= RECOVERY_S
        await run.well()
        await run.audit(kept)
        assert len(run.logged("ingest", "store at its mark")) == 1


async def test_a_full_store_loses_nothing_and_everything_behind_ingest_goes_on(tmp_path: Path) -> None:
    async with world(tmp_path, "16mb") as run:
        await run.start("ingest", "reward", "rollout")
        run.send("reward", signal.SIGSTOP)
        await run.stock(100)
        for _ in range(40):
            await run.publish()
        await run.publish(task_payload_json="{}")
        await run.worker_plays()

        # Less than an empty server needs: nothing that drains brings it below.
        await run.redis.config_set("maxmemory", "1mb")
        assert (await run.refused()).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await run.lease(1)).admission == pb.ADMISSION_STATE_BACK_PRESSURE
        held = [lease.lease_id for lease in run.leases]
        renewed = await run.stub.RenewLeases(pb.RenewLeasesRequest(worker_id="feeder", lease_ids=held), timeout=10)
        assert [lease.lease_id for lease in renewed.renewed] == held
        await eventually(run.kept_something, what="the worker to keep what it has", poll_s=0.02)
        kept = spooled(run.spool)

        async def told() -> bool:
            return await run.metric("ingest", 'sao_ingest_store_pressure{state="full"}') == 1

        await eventually(told, what="ingest to say so", poll_s=0.05)
        assert "the reward service does not keep up" in run.logged("ingest", "store full")[0]["do"]
        status = await run.status()
        assert "STORE FULL" in status
        assert "the reward service does not keep up" in status

        # A preference, scores, a dead letter, a new trainer with a consumer group of its own: all while it is full.
        trainer = run.begin("trainer")
        run.send("reward", signal.SIGCONT)
        preferences = f"http://127.0.0.1:{run.config.reward.port}/v1/preferences"
        async with httpx.AsyncClient() as client:
            document = (await client.get(preferences, timeout=10)).json()["document"] | {"name": "switched"}
            assert (await client.put(preferences, json=document, timeout=10)).status_code == httpx.codes.OK
        await eventually(lambda: run.empty(TRAJECTORIES), what="the reward service to drain", poll_s=0.02)
        await trainer
        await eventually(lambda: run.empty(SCORED), what="the trainer to settle", poll_s=0.02)
        assert len(await run.streams.dead_letters(count=10)) == 1
        assert "1 dead letters wait for a decision: invalid 1" in await run.status()
        await run.well()
        assert await run.share() >= 1.0
        assert len(run.logged("ingest", "store full")) == 1

        await run.redis.config_set("maxmemory", "16mb")
        assert await run.recovers(kept) <= RECOVERY_S
        await run.well()
        await run.audit(kept)
