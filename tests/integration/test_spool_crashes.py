"""A worker killed (SIGKILL) at every transition between a finished episode and its durable acknowledgement.

Real worker processes, gRPC and Valkey; the next worker of the same id replays what the killed one had spooled.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from sao import board as boards
from sao import streams as trajectory_streams
from sao.config import RunConfig, load_run_config
from sao.config.dump import dump_run_config
from sao.streams.base import StreamName, TrajectoryStreams
from sao.tasks.calculator import Calculator
from sao.tasks.tiny_tokenizer import build_tokenizer_json
from sao.trajectory import Trajectory
from sao.weights.filesystem import FileSystemVersionStore
from services.rollout.app import spool_folder
from services.rollout.ingest import leases
from services.rollout.ingest.leases.base import LeaseLedger
from tests.support.crashing_worker import CRASH_AT, CRASHES, spooled
from tests.support.ingest import VOCAB, serving
from tests.support.processes import free_port
from tests.support.rollout_worker import write_engine
from tests.support.trajectories import ROUTING, VERSIONS
from tests.support.versions import publish_checkpoint, write_toy_checkpoint
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(180)


@dataclass
class Audit:
    """Everything that ever came onto the stream, in order."""

    config: RunConfig
    """What workers are given: with the address of ingest."""
    streams: TrajectoryStreams
    ledger: LeaseLedger
    ids: list[str] = field(default_factory=list)
    ordinals: list[int] = field(default_factory=list)

    async def collect(self) -> None:
        """Take what is new, so that admission goes on."""
        for delivery in await self.streams.read(StreamName.TRAJECTORIES, "audit", count=64, block_ms=10):
            payload = await self.streams.payload(delivery.trajectory_id)
            assert payload is not None
            trajectory = Trajectory.from_bytes(payload)
            routes = await self.streams.routed_experts(trajectory.id)
            assert routes is not None
            assert len(routes) == (len(trajectory.token_ids) - 1) * ROUTING.row_bytes
            self.ids.append(trajectory.id)
            self.ordinals.append(trajectory.message.ordinal)
            await self.streams.mark_consumed([trajectory.id])

    async def ended(self, process: subprocess.Popen[bytes]) -> None:
        """Collect until the process has ended."""

        async def dead() -> bool:
            await self.collect()
            return process.poll() is not None

        await eventually(dead, what=f"the end of process {process.pid}", timeout_s=60)

    async def frontier(self) -> int:
        return (await self.ledger.state(0)).frontier_ordinal


@pytest.fixture
def config(run_config: RunConfig) -> RunConfig:
    sets = [
        f"run.name={run_config.run.name}",
        f'run.dir="{run_config.run.dir}"',
        f'redis.url="{run_config.redis.url}"',
        f"rollout.metrics_port={free_port()}",
        "rollout.concurrency=4",
        "trainer.routing_replay=true",
        "ingest.lease_ttl_s=1.0",
    ]
    return load_run_config(None, sets, env={})


@pytest.fixture
def checkpoint(config: RunConfig, tmp_path: Path) -> None:
    """The store's first version: enough of a checkpoint for ingest and worker."""
    source = write_toy_checkpoint(tmp_path / "toy", 0, vocab_size=VOCAB)
    shape = {
        "num_hidden_layers": ROUTING.layers,
        "num_experts": ROUTING.experts,
        "num_experts_per_tok": ROUTING.per_token,
    }
    (source / "config.json").write_text(
        json.dumps({"vocab_size": VOCAB, "architectures": ["Qwen3MoeForCausalLM"], **shape})
    )
    (source / "tokenizer.json").write_text(build_tokenizer_json(Calculator()))
    store = FileSystemVersionStore(config.versions_dir, min_free_bytes=0)
    published = publish_checkpoint(store, source, lambda _, ids: [0.0] * (len(ids) - 1))
    assert published.version in VERSIONS


@contextlib.asynccontextmanager
async def ingest_and_audit(config: RunConfig) -> AsyncIterator[Audit]:
    streams, board, ledger = trajectory_streams.connect(config), boards.connect(config), leases.connect(config)
    try:
        async with serving(config, streams, board, ledger) as ingest:
            await write_engine(board, "engine-0", verified=VERSIONS)
            await streams.open_consumer(StreamName.TRAJECTORIES, "audit")
            yield Audit(ingest.config, streams, ledger)
    finally:
        await ledger.close()
        await streams.close()
        await board.close()


@contextlib.contextmanager
def worker(config: RunConfig, folder: Path, crash_at: str = "") -> Iterator[subprocess.Popen[bytes]]:
    run_file = folder / "run.toml"
    run_file.write_text(dump_run_config(config))
    log = run_file.with_name(f"worker-{free_port()}.log")
    command = [sys.executable, "-m", "tests.support.crashing_worker", "--config", str(run_file)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, CRASH_AT: crash_at})
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=10)


def published(port: int, status: str) -> float:
    """How many trajectories the worker has handed over with this answer."""
    name = f'sao_rollout_published_total{{status="{status}"}}'
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


ALL_AFTER_THE_WRITE = list(CRASHES)[2:]


@pytest.mark.parametrize("crashes", [[name] for name in CRASHES] + [ALL_AFTER_THE_WRITE], ids="; then ".join)
async def test_every_spooled_episode_is_on_the_stream_exactly_once(
    crashes: Sequence[str], config: RunConfig, checkpoint: None, tmp_path: Path
) -> None:
    spool, ever_spooled = spool_folder(config), set[str]()
    async with ingest_and_audit(config) as audit:
        for crash in crashes:
            with worker(audit.config, tmp_path, crash) as process:
                await audit.ended(process)
            assert process.returncode == -signal.SIGKILL, f"see the logs in {tmp_path}"
            ever_spooled |= spooled(spool)
            assert spooled(spool) or crash not in ALL_AFTER_THE_WRITE
        played_before = await audit.frontier()

        with worker(audit.config, tmp_path) as process:

            async def caught_up() -> bool:
                await audit.collect()
                return set(audit.ids) >= ever_spooled and await audit.frontier() >= played_before + 8

            await eventually(caught_up, what=f"the replay and new work, logs in {tmp_path}", timeout_s=60)
            duplicates = published(config.rollout.metrics_port, "duplicate")
            process.send_signal(signal.SIGTERM)
            await audit.ended(process)
            assert process.returncode == 0
        await audit.collect()

        assert spooled(spool) == set()
        assert max(Counter(audit.ids).values()) == 1
        assert max(Counter(audit.ordinals).values()) == 1
        assert set(audit.ordinals) >= set(range(await audit.frontier()))
    if crashes[-1] in ALL_AFTER_THE_WRITE[1:]:
        assert duplicates >= 1, "ingest had it already, and said so"
    if "in the middle of the write" in crashes:
        assert list(spool.glob("*.torn"))
