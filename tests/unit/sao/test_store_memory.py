"""What is said of a store that fills up."""

from __future__ import annotations

import pytest

from sao.config.schema import RedisSection
from sao.ids import uuid7
from sao.store_memory import Pressure, StoreUse, advice, contents, pressure, read_use, waiting_dead
from sao.streams.base import DeadEvent, DeadTotals, StreamDepth, StreamName
from sao.streams.memory import MemoryStreams
from sao.streams.room import RoomUse

SETTINGS = RedisSection(maxmemory_mb=64)
NO_DEAD = DeadTotals(0, {})


def use_of(
    *, waiting: int = 0, scored: int = 0, held: int = 0, parked: int = 0, dead_mb: int = 0, share: float = 0.85
) -> StoreUse:
    return StoreUse(
        share=share,
        trajectories=StreamDepth(waiting, 0, 7.0),
        scored=StreamDepth(scored, held, 3.0),
        unconsumed=waiting + scored,
        dead=DeadTotals(dead_mb * 2**20, {}),
        feedback=RoomUse(parked, 1 if parked else None),
    )


@pytest.mark.parametrize(
    ("share", "found"),
    [(0.0, Pressure.ROOM), (0.79, Pressure.ROOM), (0.8, Pressure.MARK), (0.99, Pressure.MARK), (1.0, Pressure.FULL)],
)
def test_pressure_is_told_by_the_mark_and_the_bound(share: float, found: Pressure) -> None:
    assert pressure(share, SETTINGS) is found


@pytest.mark.parametrize(
    ("use", "cause"),
    [
        (use_of(waiting=9, scored=3), "the reward service does not keep up"),
        (use_of(waiting=3, scored=9, held=2), "the trainer does not keep up"),
        (use_of(waiting=3, scored=9, held=8), "the trainer's next checkpoint"),
        (use_of(waiting=9, scored=3, parked=10), "waits for feedback: reward.feedback.waiting_max"),
        (use_of(), "nothing of this run fills it"),
        (use_of(waiting=9, dead_mb=16), "sao dead list"),
    ],
)
def test_the_advice_names_who_does_not_drain_and_how_to_give_more_memory(use: StoreUse, cause: str) -> None:
    told = advice(use, SETTINGS)
    assert cause in told
    assert "redis.maxmemory_mb" in told
    assert "CONFIG SET maxmemory" in told


def test_the_contents_are_counted_by_who_has_them() -> None:
    told = contents(use_of(waiting=9, scored=5, held=2, dead_mb=3))
    assert told == (
        "9 trajectories on the way through the reward service, oldest 7 s; "
        "5 scored ones, oldest 3 s, 2 of them with the trainer until its next checkpoint; dead letters 3.0 MiB"
    )


def test_what_waits_for_feedback_is_counted_where_there_is_any() -> None:
    assert "next checkpoint; 4 that wait for feedback; dead letters 0.0 MiB" in contents(use_of(parked=4))


def test_dead_letters_that_were_dealt_with_do_not_wait() -> None:
    counts = {
        DeadEvent.BURIED: {"invalid": 3, "timeout": 2, "infra_failed": 4},
        DeadEvent.REQUEUED: {"infra_failed": 3},
        DeadEvent.DROPPED: {"timeout": 1},
        DeadEvent.FORGOTTEN: {"timeout": 1},
    }
    assert waiting_dead(DeadTotals(0, counts)) == {"infra_failed": 1, "invalid": 3}
    assert waiting_dead(NO_DEAD) == {}


async def test_the_use_is_read_from_the_streams() -> None:
    streams = MemoryStreams(capacity_bytes=100)
    await streams.open_consumer(StreamName.SCORED, "t")
    await streams.open_consumer(StreamName.TRAJECTORIES, "r")
    for ordinal in range(3):
        await streams.append(uuid7(), b"x" * 20, ordinal=ordinal, sample=0, fields={})
    first, second = await streams.read(StreamName.TRAJECTORIES, "r", count=2, block_ms=0)
    await streams.move(first, "r", StreamName.SCORED, {})
    await streams.read(StreamName.SCORED, "t", count=1, block_ms=0)
    await streams.bury(second, "r", "invalid: test")

    use = await read_use(streams)

    assert use.share == pytest.approx(0.6)
    assert (use.trajectories.length, use.scored.length, use.scored.pending, use.unconsumed) == (1, 1, 1, 2)
    assert waiting_dead(use.dead) == {"invalid": 1}
