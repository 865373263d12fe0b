"""What becomes of dead letters (sao/streams/base.py), on the in-memory twin and on a real Valkey."""

from __future__ import annotations

import time

import pytest

from sao.streams.base import LETTER_BYTES, DeadEvent, DeadLetter, RequeueStatus, StreamFullError, StreamName
from sao.streams.memory import MemoryStreams
from tests.support.stores import Stores, memory_stores, open_stores
from tests.support.waiting import eventually

TRAJECTORIES, SCORED = StreamName.TRAJECTORIES, StreamName.SCORED
TEXTS = len("broken: x") + len('{"ordinal": "0"}')


async def bury(
    stores: Stores, ordinal: int, reason: str, *, stream: StreamName = TRAJECTORIES, payload: bytes = b"payload"
) -> DeadLetter:
    """A new trajectory that goes as far as `stream` and is buried there; its letter."""
    streams = stores.streams
    await stores.append(ordinal, payload=payload)
    await streams.open_consumer(TRAJECTORIES, "r")
    (delivery,) = await streams.read(TRAJECTORIES, "r", count=1, block_ms=0)
    if stream is SCORED:
        assert await streams.move(delivery, "r", SCORED, {**delivery.fields, "outcome": "{}"})
        await streams.open_consumer(SCORED, "r")
        (delivery,) = await streams.read(SCORED, "r", count=1, block_ms=0)
    assert await streams.bury(delivery, "r", reason)
    (letter,) = await streams.dead_letters(count=1)
    return letter


@pytest.mark.parametrize("stream", list(StreamName))
async def test_a_requeued_trajectory_is_delivered_anew_where_it_was(stores: Stores, stream: StreamName) -> None:
    streams = stores.streams
    letter = await bury(stores, 0, "infra_failed: the judge was away", stream=stream)
    assert (letter.stream, letter.kind) == (stream, "infra_failed")
    assert await streams.unconsumed() == 0

    assert await streams.requeue_dead(letter) is RequeueStatus.REQUEUED
    assert await streams.dead_letters(count=10) == []
    assert await streams.unconsumed() == 1
    (delivery,) = await streams.read(stream, "r", count=10, block_ms=0)
    assert (delivery.trajectory_id, delivery.attempt) == (letter.trajectory_id, 1)
    assert delivery.fields == letter.fields == {"ordinal": "0", **({"outcome": "{}"} if stream is SCORED else {})}
    assert await streams.payload(letter.trajectory_id) == b"payload"

    assert await streams.requeue_dead(letter) is RequeueStatus.GONE
    assert not await streams.drop_dead(letter)
    assert await streams.payload(letter.trajectory_id) == b"payload", "a letter of old does no harm"
    epoch = await stores.board.new_trainer_epoch()
    assert await streams.settle([delivery], "r", epoch=epoch) == 1


async def test_a_requeued_trajectory_may_die_again(stores: Stores) -> None:
    streams = stores.streams
    first = await bury(stores, 0, "invalid: once")
    await streams.requeue_dead(first)
    (delivery,) = await streams.read(TRAJECTORIES, "r", count=1, block_ms=0)
    assert await streams.bury(delivery, "r", "invalid: twice")
    (second,) = await streams.dead_letters(count=10)
    assert (second.trajectory_id, second.reason) == (first.trajectory_id, "invalid: twice")
    assert not await streams.drop_dead(first)
    assert await streams.drop_dead(second)


async def test_a_letter_whose_payload_is_gone_is_not_requeued_but_can_be_dropped(stores: Stores) -> None:
    streams = stores.streams
    letter = await bury(stores, 0, "invalid: its payload is gone from the store")
    await lose_payload(stores, letter.trajectory_id)
    assert await streams.requeue_dead(letter) is RequeueStatus.NO_PAYLOAD
    assert await streams.dead_letters(count=1) == [letter]
    assert await streams.unconsumed() == 0
    assert (await streams.depth(TRAJECTORIES)).length == 0
    assert await streams.drop_dead(letter)


async def lose_payload(stores: Stores, trajectory_id: str) -> None:
    """As an operator's hand or an eviction would."""
    streams = stores.streams
    if isinstance(streams, MemoryStreams):
        del streams._payloads[trajectory_id]
    else:
        await streams._client.delete(streams._keys.payload(trajectory_id))  # type: ignore[attr-defined]


async def test_a_dropped_letter_goes_with_its_payload_and_is_counted_by_kind(stores: Stores) -> None:
    streams = stores.streams
    letters = [await bury(stores, n, reason) for n, reason in enumerate(["timeout: a", "timeout: b", "invalid: c"])]
    assert await streams.drop_dead(letters[0])
    assert not await streams.drop_dead(letters[0])
    assert await streams.drop_dead(letters[2])
    await streams.requeue_dead(letters[1])

    assert [await streams.payload(letter.trajectory_id) for letter in letters] == [None, b"payload", None]
    totals = await streams.dead_totals()
    assert totals.size == 0
    assert totals.counts == {
        DeadEvent.BURIED: {"timeout": 2, "invalid": 1},
        DeadEvent.DROPPED: {"timeout": 1, "invalid": 1},
        DeadEvent.REQUEUED: {"timeout": 1},
    }


async def test_letters_are_listed_in_pages(stores: Stores) -> None:
    streams = stores.streams
    oldest, *_, newest = [await bury(stores, n, f"invalid: {n}") for n in range(5)]
    first = await streams.dead_letters(count=3)
    rest = await streams.dead_letters(count=3, before=first[-1].entry_id)
    assert [letter.reason for letter in (*first, *rest)] == [f"invalid: {n}" for n in (4, 3, 2, 1, 0)]
    assert (first[0], rest[-1]) == (newest, oldest)
    assert await streams.dead_letters(count=3, before=oldest.entry_id) == []


async def test_beyond_their_bound_the_oldest_are_forgotten_with_their_payloads_and_counted(
    store_url: str | None,
) -> None:
    one = LETTER_BYTES + TEXTS + 1000
    async with open_stores(store_url, dead_bytes=2 * one) as stores:
        letters = [await bury(stores, n, "broken: x", payload=bytes(1000)) for n in range(4)]
        assert [letter.size for letter in letters] == [one] * 4
        assert await stores.streams.dead_letters(count=10) == letters[:1:-1]
        payloads = [await stores.streams.payload(letter.trajectory_id) for letter in letters]
        assert payloads == [None, None, bytes(1000), bytes(1000)]
        totals = await stores.streams.dead_totals()
        assert totals.size == 2 * one
        assert totals.counts == {DeadEvent.BURIED: {"broken": 4}, DeadEvent.FORGOTTEN: {"broken": 2}}


async def test_letters_that_are_over_their_time_are_forgotten_the_others_keep_their_place(stores: Stores) -> None:
    streams = stores.streams
    first, second = [await bury(stores, number, "invalid: x") for number in range(2)]
    assert await streams.forget_dead_before(first.buried_ms) == 0, "not older than that"
    moment = max(first.buried_ms, second.buried_ms) + 1
    await eventually(lambda: time.time_ns() // 1_000_000 > moment, what="another millisecond")
    later = await bury(stores, 2, "timeout: x")
    assert await streams.forget_dead_before(moment) == 2
    assert await streams.dead_letters(count=9) == [later]
    payloads = [await streams.payload(letter.trajectory_id) for letter in (first, second, later)]
    assert payloads == [None, None, b"payload"]
    totals = await streams.dead_totals()
    assert totals.size == later.size
    assert totals.counts == {DeadEvent.BURIED: {"invalid": 2, "timeout": 1}, DeadEvent.FORGOTTEN: {"invalid": 2}}
    assert await streams.forget_dead_before(moment) == 0
    assert not await streams.drop_dead(first)
    assert await streams.requeue_dead(later) is RequeueStatus.REQUEUED


async def test_a_run_without_dead_letters_has_no_totals(stores: Stores) -> None:
    totals = await stores.streams.dead_totals()
    assert (totals.size, totals.counts) == (0, {})


async def test_a_full_store_takes_no_requeued_work_and_keeps_the_letter() -> None:
    stores = memory_stores()
    letter = await bury(stores, 0, "invalid: x")
    assert isinstance(stores.streams, MemoryStreams)
    stores.streams._capacity = 1
    with pytest.raises(StreamFullError, match=letter.trajectory_id):
        await stores.streams.requeue_dead(letter)
    assert await stores.streams.dead_letters(count=1) == [letter]
    assert await stores.streams.drop_dead(letter), "dropping makes room"


async def test_an_erased_letter_is_dropped_and_the_others_keep_their_place(stores: Stores) -> None:
    streams = stores.streams
    first, second, third = [await bury(stores, number, "invalid: x") for number in range(3)]
    erased = await streams.erase(second.trajectory_id, {})
    assert (erased.dead_letters, erased.entries, erased.anything) == (1, 0, True)
    assert [one.entry_id for one in await streams.dead_letters(count=9)] == [third.entry_id, first.entry_id]
    totals = await streams.dead_totals()
    assert (totals.counts[DeadEvent.DROPPED], totals.size) == ({"invalid": 1}, first.size + third.size)
    assert await streams.requeue_dead(second) is RequeueStatus.GONE
    assert await streams.requeue_dead(first) is RequeueStatus.REQUEUED
    later = await bury(stores, 3, "invalid: x")
    assert [one.entry_id for one in await streams.dead_letters(count=9)] == [later.entry_id, third.entry_id]
    assert not (await streams.erase(second.trajectory_id, {})).anything
