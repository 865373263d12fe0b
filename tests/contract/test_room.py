"""The waiting room's contract (sao/streams/room.py), on the in-memory twin and on a real Valkey."""

from __future__ import annotations

import asyncio

import pytest

from sao.ids import uuid7
from sao.streams.base import AppendStatus, DeadEvent, Delivery, RequeueStatus, StreamName
from sao.streams.room import Feedback, Heard, RoomUse, Waiting
from tests.support.stores import Stores, open_stores

TRAJECTORIES, SCORED = StreamName.TRAJECTORIES, StreamName.SCORED
NOW = 1_764_000_000_000


def said(value: float, *, at_ms: int = NOW, author: str = "") -> Feedback:
    return Feedback(value=value, at_ms=at_ms, author=author)


async def deliver(stores: Stores, ordinal: int) -> Delivery:
    """A new trajectory in the hands of consumer `r`."""
    trajectory_id = await stores.append(ordinal)
    await stores.streams.open_consumer(TRAJECTORIES, "r")
    while True:
        for delivery in await stores.streams.read(TRAJECTORIES, "r", count=100, block_ms=0):
            if delivery.trajectory_id == trajectory_id:
                return delivery


async def park(stores: Stores, ordinal: int, *, now_ms: int = NOW) -> Waiting:
    """A new trajectory in the room."""
    delivery = await deliver(stores, ordinal)
    fields = {**delivery.fields, "partial": "ä"}
    assert await stores.streams.room.park(delivery, "r", fields, now_ms=now_ms)
    return Waiting(delivery.trajectory_id, fields, now_ms)


async def answer(stores: Stores, trajectory_id: str, value: float, *, kept_max: int = 9) -> Heard:
    return await stores.streams.room.answer(trajectory_id, said(value), kept_max=kept_max)


async def scored(stores: Stores) -> list[Delivery]:
    await stores.streams.open_consumer(SCORED, "t")
    return await stores.streams.read(SCORED, "t", count=100, block_ms=0)


async def test_what_is_parked_is_off_its_stream_out_of_admission_and_whole(stores: Stores) -> None:
    streams = stores.streams
    younger, older = await park(stores, 0, now_ms=NOW + 5), await park(stores, 1)
    assert await streams.unconsumed() == 0
    assert (await streams.depth(TRAJECTORIES)).length == (await streams.depth(TRAJECTORIES)).pending == 0
    assert await streams.payload(older.trajectory_id) == b"payload"
    assert await streams.room.waiting(count=9) == [older, younger]
    assert await streams.room.waiting(count=1) == [older]
    assert await streams.room.use() == RoomUse(waiting=2, oldest_ms=NOW, kept=0)
    assert await streams.recognised([older.trajectory_id]) == {older.trajectory_id}
    again = await streams.append(older.trajectory_id, b"x", ordinal=1, sample=0, fields={})
    assert again is AppendStatus.DUPLICATE


async def test_an_empty_room(stores: Stores) -> None:
    room = stores.streams.room
    assert await room.use() == RoomUse()
    assert (await room.waiting(count=5), await room.answered(count=5)) == ([], [])
    assert await room.find(uuid7()) is None
    assert await room.forget(kept_before_ms=NOW, joined_before_ms=NOW, remembered=1) == 0


async def test_only_the_owner_of_a_delivery_parks_it(stores: Stores) -> None:
    streams = stores.streams
    delivery = await deliver(stores, 0)
    (newer,) = await streams.claim(TRAJECTORIES, "other", idle_ms=0, count=1)
    assert not await streams.room.park(delivery, "r", {}, now_ms=NOW)
    assert await streams.unconsumed() == 1
    assert await streams.room.use() == RoomUse()
    assert await streams.room.park(newer, "other", {}, now_ms=NOW)
    assert not await streams.room.park(newer, "other", {}, now_ms=NOW + 1), "a repeat moves nothing"


async def test_an_answer_joins_its_trajectory_once_whoever_is_first(stores: Stores) -> None:
    streams = stores.streams
    waiting = await park(stores, 0)
    await park(stores, 1)
    assert await streams.room.answered(count=9) == []
    assert await answer(stores, waiting.trajectory_id, 0.5) is Heard.WAITING
    assert await streams.room.answered(count=9) == [(waiting, said(0.5))]
    assert await streams.room.find(waiting.trajectory_id) == (waiting, said(0.5))

    joins = (streams.room.join(waiting, {"outcome": str(n)}, now_ms=NOW + 1) for n in range(8))
    assert sorted(await asyncio.gather(*joins)) == [False] * 7 + [True]

    (delivery,) = await scored(stores)
    assert (delivery.trajectory_id, delivery.attempt) == (waiting.trajectory_id, 1)
    assert await streams.payload(waiting.trajectory_id) == b"payload"
    assert await streams.unconsumed() == 0
    assert await streams.room.answered(count=9) == []
    assert (await streams.room.use()).waiting == 1
    epoch = await stores.board.new_trainer_epoch()
    assert await streams.settle([delivery], "t", epoch=epoch) == 1


async def test_answers_repeated_are_the_same_answer_and_others_are_refused(stores: Stores) -> None:
    room, waiting = stores.streams.room, await park(stores, 0)
    one = waiting.trajectory_id
    assert await answer(stores, one, 0.1 + 0.2) is Heard.WAITING
    assert await answer(stores, one, 0.1 + 0.2) is Heard.WAITING
    assert await answer(stores, one, 0.3) is Heard.CONFLICT
    assert await room.join(waiting, {}, now_ms=NOW)
    assert await answer(stores, one, 0.1 + 0.2) is Heard.JOINED
    assert await answer(stores, one, 0.3) is Heard.CONFLICT
    other = (await park(stores, 1)).trajectory_id
    assert await answer(stores, other, 0.0) is Heard.WAITING
    assert await answer(stores, other, -0.0) is Heard.WAITING


async def test_eight_different_answers_at_once_have_one_winner(stores: Stores) -> None:
    waiting = await park(stores, 0)
    heard = await asyncio.gather(*(answer(stores, waiting.trajectory_id, float(n)) for n in range(8)))
    assert sorted(one.value for one in heard) == ["conflict"] * 7 + ["waiting"]
    ((_, kept),) = await stores.streams.room.answered(count=9)
    assert heard[int(kept.value)] is Heard.WAITING


async def test_an_answer_that_comes_early_is_kept_until_its_trajectory_is_parked(stores: Stores) -> None:
    room, delivery = stores.streams.room, await deliver(stores, 0)
    one = delivery.trajectory_id
    assert await answer(stores, one, 1.0) is Heard.KEPT
    assert await answer(stores, one, 1.0) is Heard.KEPT
    assert await answer(stores, one, 0.0) is Heard.CONFLICT
    assert await room.find(one) is None
    assert await room.use() == RoomUse(kept=1)
    assert await room.park(delivery, "r", {}, now_ms=NOW)
    assert await room.use() == RoomUse(waiting=1, oldest_ms=NOW)
    assert await room.find(one) == (Waiting(one, {}, NOW), said(1.0))
    assert [pair[0].trajectory_id for pair in await room.answered(count=9)] == [one]


async def test_answers_that_are_kept_have_a_bound_and_waiting_trajectories_do_not_count(stores: Stores) -> None:
    parked = await park(stores, 0)
    ids = [await stores.append(ordinal) for ordinal in (1, 2, 3)]
    assert await answer(stores, parked.trajectory_id, 1.0, kept_max=2) is Heard.WAITING
    heard = [await answer(stores, one, 1.0, kept_max=2) for one in ids]
    assert heard == [Heard.KEPT, Heard.KEPT, Heard.FULL]
    assert await answer(stores, ids[0], 1.0, kept_max=2) is Heard.KEPT, "a repeat needs no room"


async def test_answers_nobody_can_use_are_refused_with_the_reason(stores: Stores) -> None:
    streams = stores.streams
    assert await answer(stores, uuid7(), 1.0) is Heard.UNKNOWN
    with pytest.raises(ValueError, match=r"badly formed|UUIDv7"):
        await answer(stores, "somebody", 1.0)
    delivery = await deliver(stores, 0)
    await streams.mark_consumed([delivery.trajectory_id])
    assert await answer(stores, delivery.trajectory_id, 1.0) is Heard.CONSUMED
    waiting = await park(stores, 1)
    assert await streams.room.bury(waiting, "timeout: nothing came", now_ms=NOW)
    assert await answer(stores, waiting.trajectory_id, 1.0) is Heard.EXPIRED
    assert await streams.room.use() == RoomUse()


async def test_what_expires_is_a_dead_letter_that_can_wait_once_more(stores: Stores) -> None:
    streams = stores.streams
    waiting = await park(stores, 0)
    buried = await asyncio.gather(*(streams.room.bury(waiting, "timeout: late", now_ms=NOW) for _ in range(4)))
    assert sorted(buried) == [False] * 3 + [True]
    (letter,) = await streams.dead_letters(count=9)
    assert (letter.trajectory_id, letter.stream, letter.kind) == (waiting.trajectory_id, TRAJECTORIES, "timeout")
    assert (letter.fields, letter.attempt) == (waiting.fields, 1)
    totals = await streams.dead_totals()
    assert totals.counts == {DeadEvent.BURIED: {"timeout": 1}}
    assert totals.size == letter.size > len(b"payload")

    assert await streams.requeue_dead(letter) is RequeueStatus.REQUEUED
    assert await answer(stores, waiting.trajectory_id, 1.0) is Heard.KEPT
    (again,) = await streams.read(TRAJECTORIES, "r", count=9, block_ms=0)
    assert await streams.room.park(again, "r", {}, now_ms=NOW + 9)
    assert not await streams.room.join(waiting, {}, now_ms=NOW), "the first parking is over"
    ((second, _),) = await streams.room.answered(count=9)
    assert second.since_ms == NOW + 9
    assert await streams.room.join(second, {}, now_ms=NOW)


async def test_an_answer_that_has_come_is_neither_buried_nor_passed_over(stores: Stores) -> None:
    streams = stores.streams
    waiting = await park(stores, 0)
    assert not await streams.room.join(waiting, {}, now_ms=NOW), "nobody has answered"
    assert await answer(stores, waiting.trajectory_id, 1.0) is Heard.WAITING
    assert not await streams.room.bury(waiting, "timeout: late", now_ms=NOW)
    assert not await streams.room.join(waiting, {}, now_ms=NOW, answered=False)
    assert await streams.room.bury(waiting, "infra_failed: no number", now_ms=NOW, answered=True)
    assert await answer(stores, waiting.trajectory_id, 1.0) is Heard.JOINED

    (letter,) = await streams.dead_letters(count=9)
    await streams.requeue_dead(letter)
    (again,) = await streams.read(TRAJECTORIES, "r", count=9, block_ms=0)
    assert await streams.room.park(again, "r", {}, now_ms=NOW + 1)
    assert len(await streams.room.answered(count=9)) == 1, "the answer is still known"
    assert await streams.room.use() == RoomUse(waiting=1, oldest_ms=NOW + 1)
    early = [await stores.append(ordinal) for ordinal in (1, 2)]
    heard = [await answer(stores, one, 1.0, kept_max=1) for one in early]
    assert heard == [Heard.KEPT, Heard.FULL], "what waits again is not counted among the kept"
    await streams.room.forget(kept_before_ms=NOW + 9, joined_before_ms=NOW + 9, remembered=0)
    ((second, heard_again),) = await streams.room.answered(count=9)
    assert heard_again == said(1.0), "it waits to be joined: not forgotten"
    assert await streams.room.join(second, {}, now_ms=NOW + 2)


async def test_what_nobody_answers_may_be_scored_without(stores: Stores) -> None:
    waiting = await park(stores, 0)
    assert await stores.streams.room.join(waiting, {"outcome": "{}"}, now_ms=NOW, answered=False)
    assert [dict(delivery.fields) for delivery in await scored(stores)] == [{"outcome": "{}"}]
    assert await answer(stores, waiting.trajectory_id, 1.0) is Heard.CONSUMED


async def test_answers_never_joined_are_let_go_and_those_joined_are_remembered_for_a_while(stores: Stores) -> None:
    room = stores.streams.room
    early = await stores.append(0)
    assert await answer(stores, early, 1.0) is Heard.KEPT
    joined = [await park(stores, 1), await park(stores, 2)]
    for number, waiting in enumerate(joined):
        await answer(stores, waiting.trajectory_id, 1.0)
        assert await room.join(waiting, {}, now_ms=NOW + number)
    answered = await park(stores, 3)
    await answer(stores, answered.trajectory_id, 1.0)

    assert await room.forget(kept_before_ms=NOW, joined_before_ms=NOW, remembered=2) == 0
    assert await room.forget(kept_before_ms=NOW + 1, joined_before_ms=NOW, remembered=1) == 1
    assert await room.use() == RoomUse(waiting=1, oldest_ms=NOW), "the early one is gone"
    assert len(await room.answered(count=9)) == 1, "what waits to be joined stays"
    heard = [await answer(stores, waiting.trajectory_id, 1.0) for waiting in joined]
    assert heard == [Heard.CONSUMED, Heard.JOINED], "one is remembered, the newest"
    await room.forget(kept_before_ms=NOW, joined_before_ms=NOW + 5, remembered=9)
    assert await answer(stores, joined[1].trajectory_id, 1.0) is Heard.CONSUMED


async def test_expiries_beyond_what_is_remembered_are_forgotten_oldest_first(stores: Stores) -> None:
    room = stores.streams.room
    gone = [await park(stores, ordinal) for ordinal in range(3)]
    for number, waiting in enumerate(gone):
        await room.bury(waiting, "timeout: late", now_ms=NOW + number)
    await room.forget(kept_before_ms=NOW, joined_before_ms=NOW, remembered=1)
    heard = [await answer(stores, waiting.trajectory_id, 1.0) for waiting in gone]
    assert heard == [Heard.CONSUMED, Heard.CONSUMED, Heard.EXPIRED]


async def test_burials_from_the_room_keep_the_dead_letters_within_their_bound(store_url: str | None) -> None:
    async with open_stores(store_url, dead_bytes=1) as stores:
        waiting = await park(stores, 0)
        assert await stores.streams.room.bury(waiting, "timeout: late", now_ms=NOW)
        assert (await stores.streams.dead_totals()).counts[DeadEvent.FORGOTTEN] == {"timeout": 1}
        assert await stores.streams.payload(waiting.trajectory_id) is None


async def test_an_erased_trajectory_waits_no_more_and_what_was_said_of_it_is_gone(stores: Stores) -> None:
    streams = stores.streams
    waiting, early = await park(stores, 0), await stores.append(1)
    assert await answer(stores, waiting.trajectory_id, 1.0) is Heard.WAITING
    assert await answer(stores, early, 1.0) is Heard.KEPT
    for one in (waiting.trajectory_id, early):
        erased = await streams.erase(one, {})
        assert (erased.answers, erased.payload, erased.waiting + erased.entries) == (1, 1, 1)
    assert await streams.room.use() == RoomUse(waiting=0, oldest_ms=None, kept=0)
    assert await streams.room.answered(count=9) == []
    assert await answer(stores, early, 1.0) is Heard.CONSUMED
    assert not await streams.room.join(waiting, {}, now_ms=NOW)
    assert not await streams.room.bury(waiting, "timeout: x", now_ms=NOW)
    assert [one.trajectory_id for one in await scored(stores)] == [waiting.trajectory_id, early]
