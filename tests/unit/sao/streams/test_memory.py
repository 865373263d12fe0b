"""What only the in-memory twin has: a clock and a memory bound of its own."""

from __future__ import annotations

import pytest

from sao.ids import uuid7
from sao.streams.base import AppendStatus, StreamFullError, StreamName
from sao.streams.memory import HOUR_MS, MemoryStreams

T0 = 500_000 * HOUR_MS


async def append(streams: MemoryStreams, ordinal: int, trajectory_id: str, payload: bytes = b"x") -> AppendStatus:
    return await streams.append(trajectory_id, payload, ordinal=ordinal, sample=0, fields={})


async def test_the_bound_refuses_whole_appends_until_something_is_settled() -> None:
    streams = MemoryStreams(capacity_bytes=10)
    assert await append(streams, 0, uuid7(), b"x" * 10) is AppendStatus.ACCEPTED
    assert await streams.memory_fraction() == 1.0
    refused = uuid7()
    with pytest.raises(StreamFullError, match=refused):
        await append(streams, 1, refused)
    assert await streams.payload(refused) is None
    assert await streams.unconsumed() == 1

    await streams.open_consumer(StreamName.TRAJECTORIES, "t")
    held = await streams.read(StreamName.TRAJECTORIES, "t", count=1, block_ms=0)
    assert await streams.settle(held, "t", epoch=1) == 1
    assert await append(streams, 1, refused) is AppendStatus.ACCEPTED


async def test_ids_are_recognised_within_the_horizon_and_forgotten_after_it() -> None:
    now = T0
    streams = MemoryStreams(horizon_h=24, clock_ms=lambda: now)
    first = uuid7(T0)
    await append(streams, 0, first)
    now = T0 + 24 * HOUR_MS
    await append(streams, 1, uuid7(now))
    assert await append(streams, 2, first) is AppendStatus.DUPLICATE
    now = T0 + 27 * HOUR_MS
    await append(streams, 2, uuid7(now))
    assert len(streams._seen) == 2


async def test_an_id_that_is_no_uuid7_is_refused() -> None:
    with pytest.raises(ValueError, match="badly formed"):
        await append(MemoryStreams(), 0, "t-1")


async def test_a_delivery_is_claimed_only_after_its_idle_time_and_age_is_measured() -> None:
    now = T0
    streams = MemoryStreams(clock_ms=lambda: now)
    await append(streams, 0, uuid7(T0))
    await streams.open_consumer(StreamName.TRAJECTORIES, "a")
    await streams.read(StreamName.TRAJECTORIES, "a", count=1, block_ms=0)
    now = T0 + 999
    assert await streams.claim(StreamName.TRAJECTORIES, "b", idle_ms=1000, count=1) == []
    now = T0 + 1000
    assert len(await streams.claim(StreamName.TRAJECTORIES, "b", idle_ms=1000, count=1)) == 1
    assert (await streams.depth(StreamName.TRAJECTORIES)).oldest_age_s == 1.0
