"""Ingest and worker as real processes between a real engine and a real Valkey."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from sao import board as boards
from sao import streams as trajectory_streams
from sao.board.base import Board, EngineFacts, EngineState
from sao.config import RunConfig, load_run_config
from sao.config.dump import dump_run_config
from sao.invariants import Limits, violations
from sao.streams.base import StreamName, TrajectoryStreams
from sao.trajectory import Trajectory
from sao.weights.filesystem import FileSystemVersionStore
from tests.support.engine import EngineServer
from tests.support.processes import free_port, server
from tests.support.versions import announce, publish_checkpoint
from tests.support.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


@pytest.fixture
def config(run_config: RunConfig, sglang_engine: EngineServer) -> RunConfig:
    """A run file whose ports are all filled in."""
    ingest, ingest_metrics, worker_metrics = free_port(), free_port(), free_port()
    sets = [
        f"run.name={run_config.run.name}",
        f'run.dir="{run_config.run.dir}"',
        f'redis.url="{run_config.redis.url}"',
        f'engine.urls=["{sglang_engine.url}"]',
        f"ingest.port={ingest}",
        f"ingest.target=127.0.0.1:{ingest}",
        f"ingest.metrics_port={ingest_metrics}",
        f"rollout.metrics_port={worker_metrics}",
        "rollout.concurrency=16",
    ]
    return load_run_config(None, sets, env={})


@pytest.fixture
def version(config: RunConfig, tiny_checkpoints: tuple[Path, Path], sglang_engine: EngineServer) -> Iterator[str]:
    """The store's first version; the engine answers to its name until the test is over."""
    store = FileSystemVersionStore(config.versions_dir, min_free_bytes=0)
    manifest = publish_checkpoint(store, tiny_checkpoints[0], lambda _, ids: [0.0] * (len(ids) - 1))
    with httpx.Client(base_url=sglang_engine.url, timeout=30) as http:
        launched = http.get("/model_info").json()["weight_version"]

        def answer_to(name: str) -> None:
            body = {"new_version": name, "abort_all_requests": False}
            http.post("/update_weight_version", json=body).raise_for_status()

        answer_to(manifest.version)
        yield manifest.version
        answer_to(launched)


@contextlib.asynccontextmanager
async def stores(config: RunConfig, version: str) -> AsyncIterator[tuple[TrajectoryStreams, Board]]:
    """The run's streams and board, with the version announced and the engine in rotation."""
    streams, board = trajectory_streams.connect(config), boards.connect(config)
    store = FileSystemVersionStore(config.versions_dir, min_free_bytes=0)
    await board.new_trainer_epoch()
    await announce(board, store.manifest(version))
    facts = EngineFacts(
        engine_id="engine-0",
        url=config.engine.urls[0],
        state=EngineState.SERVING,
        version=version,
        verified=[version],
        since_s=time.time(),
    )
    await board.write_engine(facts)
    try:
        yield streams, board
    finally:
        await streams.close()
        await board.close()


def ready(port: int) -> Callable[[], bool]:
    def ask() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    return ask


def service(module: str, port: int, folder: Path) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """`python -m MODULE --config RUN.toml`, until it is ready."""
    command = [sys.executable, "-m", module, "--config", str(folder / "run.toml")]
    return server(command, log=folder / f"{module}-{free_port()}.log", ready=ready(port), timeout_s=60)


def scraped(port: int) -> str:
    return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text


def stop(process: subprocess.Popen[bytes]) -> float:
    """Ask it to end; the seconds it took. Its exit status must be 0."""
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 0
    return time.monotonic() - started


async def test_real_rollouts_reach_the_stream_and_an_ingest_that_dies_is_survived(
    config: RunConfig, version: str, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(dump_run_config(config))
    found: dict[str, Trajectory] = {}
    async with stores(config, version) as (streams, _):

        async def collect() -> int:
            for delivery in await streams.read(StreamName.TRAJECTORIES, "test", count=64, block_ms=10):
                payload = await streams.payload(delivery.trajectory_id)
                assert payload is not None
                found[delivery.trajectory_id] = Trajectory.from_bytes(payload)
                await streams.mark_consumed([delivery.trajectory_id])
            return len(found)

        async def reached(count: int) -> None:
            async def enough() -> bool:
                return await collect() >= count

            await eventually(enough, what=f"{count} trajectories, logs in {tmp_path}", timeout_s=60)

        await streams.open_consumer(StreamName.TRAJECTORIES, "test")
        ingest_port, worker_port = config.ingest.metrics_port, config.rollout.metrics_port
        with (
            service("services.rollout.ingest", ingest_port, tmp_path) as first,
            service("services.rollout", worker_port, tmp_path) as worker,
        ):
            await reached(20)
            first.kill()
            first.wait(timeout=10)
            with service("services.rollout.ingest", ingest_port, tmp_path) as second:
                await reached(len(found) + 20)
                assert 'sao_rollout_published_total{status="accepted"}' in scraped(worker_port)
                assert stop(worker) < 3
                assert stop(second) < 3

    limits = Limits(run=config.run.name, vocab_size=32, max_tokens=96, max_bytes=2**20, logprob_tolerance=1e-5)
    for trajectory in found.values():
        assert violations(trajectory.message, limits, {version}) == []
    ordinals = sorted(trajectory.message.ordinal for trajectory in found.values())
    assert len(set(ordinals)) == len(ordinals), "each ordinal at most once"
