"""The real rollout worker on an in-memory engine; it kills itself (SIGKILL) the third time it comes to a transition.

`CRASH_AT=NAME python -m tests.support.crashing_worker --config RUN.toml`; without a name it is an ordinary worker.
`TURN_S` is about how long its engine takes for a turn, so that a test finds episodes in the middle; else no time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sao.config import RunConfig
from sao.process import run_service
from sao.routing import RoutingShape
from sao.v1 import ingest_pb2 as pb
from sao.weights.filesystem import FileSystemVersionStore
from services.rollout import app
from services.rollout.engines.base import Engine, Turn
from services.rollout.engines.memory import MemoryEngine
from services.rollout.publisher import Publisher, PublishResult
from services.rollout.spool import Spool
from tests.support.rollout_worker import often_stopping

CRASH_AT = "CRASH_AT"
TURN_S = "TURN_S"
_WHEN = 3

Put = Callable[[Spool, pb.PublishRequest], Awaitable[bool]]
_real_put: Put = Spool.put
_real_call = Publisher._call
_real_remove = Spool.remove
_real_fsync = os.fsync
_times = itertools.count(1)


def die_in_time() -> None:
    """Die without a last word, if this is the third time."""
    if next(_times) == _WHEN:
        os.kill(os.getpid(), signal.SIGKILL)


async def _put_or_die(spool: Spool, request: pb.PublishRequest) -> bool:
    die_in_time()
    return await _real_put(spool, request)


async def _put_and_die(spool: Spool, request: pb.PublishRequest) -> bool:
    stored = await _real_put(spool, request)
    die_in_time()
    return stored


async def _call_and_die(publisher: Publisher, request: pb.PublishRequest) -> PublishResult:
    answer = await _real_call(publisher, request)
    die_in_time()
    return answer


async def _remove_or_die(spool: Spool, trajectory_id: str) -> None:
    die_in_time()
    await _real_remove(spool, trajectory_id)


def _half_written_and_die(descriptor: int) -> None:
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and next(_times) == _WHEN:
        os.ftruncate(descriptor, status.st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    _real_fsync(descriptor)


CRASHES: dict[str, tuple[object, str, object]] = {
    "before the spool's write": (Spool, "put", _put_or_die),
    "in the middle of the write": (os, "fsync", _half_written_and_die),
    "after the write, before the publish": (Spool, "put", _put_and_die),
    "after ingest's append, before the answer is read": (Publisher, "_call", _call_and_die),
    "after the answer, before the removal": (Spool, "remove", _remove_or_die),
}
"""By transition: what is replaced by what."""


class _TakesItsTime(MemoryEngine):
    """An engine whose turns do not all end at once."""

    async def generate(self, *args: Any, **kwargs: Any) -> Turn:
        await asyncio.sleep(random.uniform(0.5, 1.5) * float(os.environ.get(TURN_S, "0")))
        return await super().generate(*args, **kwargs)


def _memory_engines(config: RunConfig, vocab_size: int, routing: RoutingShape | None) -> dict[str, Engine]:
    version = FileSystemVersionStore(config.versions_dir, min_free_bytes=0).names()[-1]
    # Another process samples other tokens, as an engine would.
    seed = os.getpid()
    engine = _TakesItsTime("engine-0", vocab_size, policy=often_stopping, version=version, seed=seed, routing=routing)
    return {engine.engine_id: engine}


def spooled(folder: Path) -> set[str]:
    """Ids of the whole files in a worker's spool."""
    return {path.stem for path in folder.glob("*.pb")}


if __name__ == "__main__":
    app._engines = _memory_engines
    if name := os.environ.get(CRASH_AT):
        setattr(*CRASHES[name])
    run_service("worker", app.main)
