"""Streams, board and leases of one fresh run, in memory or in a real Valkey."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

import redis

from sao.board.base import Board
from sao.board.memory import MemoryBoard
from sao.board.redis import RedisBoard
from sao.config.schema import RedisSection
from sao.ids import uuid7
from sao.redis_client import RunKeys, connect_redis
from sao.streams.base import AppendStatus, TrajectoryStreams
from sao.streams.memory import MemoryStreams
from sao.streams.redis import RedisStreams
from services.rollout.ingest.leases.base import LeaseLedger
from services.rollout.ingest.leases.memory import MemoryLeaseLedger
from services.rollout.ingest.leases.redis import RedisLeaseLedger


@dataclass(frozen=True)
class Stores:
    """Everything that one run keeps outside its processes."""

    streams: TrajectoryStreams
    board: Board
    ledger: LeaseLedger

    async def append(self, ordinal: int, *, sample: int = 0, payload: bytes = b"payload") -> str:
        """A new trajectory on the stream; its id."""
        trajectory_id = uuid7()
        fields = {"ordinal": str(ordinal)}
        status = await self.streams.append(trajectory_id, payload, ordinal=ordinal, sample=sample, fields=fields)
        assert status is AppendStatus.ACCEPTED
        return trajectory_id


def claim(client: redis.Redis, keys: RunKeys) -> None:
    """Leave the store as if a trainer had claimed it, with epoch 1 for the next one."""
    client.hsetnx(keys.board, "epoch", "0")


def memory_stores(*, samples: int = 1, dead_bytes: int = 2**20, claimed: bool = True) -> Stores:
    """The in-memory twins, wired to each other, claimed by a trainer."""
    board = MemoryBoard(claimed=claimed)
    streams = MemoryStreams(board, samples=samples, dead_bytes=dead_bytes)
    return Stores(streams, board, MemoryLeaseLedger(streams))


@contextlib.asynccontextmanager
async def redis_stores(
    url: str,
    *,
    run: str | None = None,
    samples: int = 1,
    timeout_s: float = 5.0,
    dead_bytes: int = 2**20,
    claimed: bool = True,
) -> AsyncIterator[Stores]:
    """The real ones, for a run of that name (a fresh one by default), which a trainer has claimed unless told not."""
    keys = RunKeys(run or f"test-{uuid.uuid4().hex[:12]}")
    section = RedisSection(url=url, timeout_s=timeout_s)
    client, once = connect_redis(section), connect_redis(section, retries=0)
    board = RedisBoard(client, keys)
    if claimed:
        with redis.Redis.from_url(url) as blocking:
            claim(blocking, keys)
    yield Stores(
        RedisStreams(client, once, keys, samples=samples, dead_bytes=dead_bytes),
        board,
        RedisLeaseLedger(once, keys, samples=samples),
    )
    await client.aclose()
    await once.aclose()


@contextlib.asynccontextmanager
async def open_stores(
    valkey_url: str | None, *, samples: int = 1, dead_bytes: int = 2**20, claimed: bool = True
) -> AsyncIterator[Stores]:
    """In memory without a URL, else in that Valkey."""
    if valkey_url is None:
        yield memory_stores(samples=samples, dead_bytes=dead_bytes, claimed=claimed)
    else:
        async with redis_stores(valkey_url, samples=samples, dead_bytes=dead_bytes, claimed=claimed) as stores:
            yield stores
