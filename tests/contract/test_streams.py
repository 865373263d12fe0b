"""The stream contract (sao/streams/base.py), on the in-memory twin and on a real Valkey."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sao.ids import uuid7
from sao.slots import Slots
from sao.streams.base import (
    FORGOTTEN,
    AppendStatus,
    DeadLetter,
    Delivery,
    FencedError,
    StreamName,
    StreamUnavailableError,
    TrajectoryStreams,
)
from tests.support.stores import Stores, open_stores

TRAJECTORIES, SCORED = StreamName.TRAJECTORIES, StreamName.SCORED


async def read_all(streams: TrajectoryStreams, stream: StreamName, consumer: str) -> list[Delivery]:
    found: list[Delivery] = []
    while batch := await streams.read(stream, consumer, count=3, block_ms=0):
        found += batch
    return found


async def test_an_appended_trajectory_is_delivered_with_its_fields_and_its_payload(stores: Stores) -> None:
    streams, trajectory_id, fields = stores.streams, uuid7(), {"task": "calculator", "id": "x", "note": "äö \n"}
    status = await streams.append(trajectory_id, b"\x00\xffbytes", ordinal=0, sample=0, fields=fields)
    assert status is AppendStatus.ACCEPTED
    assert await streams.unconsumed() == 1

    await streams.open_consumer(TRAJECTORIES, "r")
    (delivery,) = await streams.read(TRAJECTORIES, "r", count=10, block_ms=0)

    assert (delivery.stream, delivery.trajectory_id, delivery.attempt) == (TRAJECTORIES, trajectory_id, 1)
    assert delivery.fields == fields
    assert await streams.payload(trajectory_id) == b"\x00\xffbytes"
    assert await streams.read(TRAJECTORIES, "r", count=10, block_ms=0) == []


async def test_a_repeated_id_changes_nothing_even_with_another_ordinal(stores: Stores) -> None:
    streams = stores.streams
    trajectory_id = await stores.append(0, payload=b"first")
    for ordinal in (0, 1):
        status = await streams.append(trajectory_id, b"second", ordinal=ordinal, sample=0, fields={})
        assert status is AppendStatus.DUPLICATE
    assert await streams.payload(trajectory_id) == b"first"
    assert (await streams.depth(TRAJECTORIES)).length == await streams.unconsumed() == 1
    await stores.append(1)  # the refused one did not take ordinal 1


async def test_routed_experts_come_with_the_first_append_and_go_with_the_payload(stores: Stores) -> None:
    streams, first, late = stores.streams, uuid7(), uuid7()
    for trajectory_id, record in ((first, b"\x00\xff"), (first, b"again"), (late, b"late")):
        await streams.append(trajectory_id, b"x", ordinal=0, sample=0, fields={"a": "b"}, routed_experts=record)
    assert await streams.routed_experts(first) == b"\x00\xff"
    assert await streams.routed_experts(late) is None, "superseded, and nothing is left of it"
    plain = await stores.append(1)
    assert await streams.routed_experts(plain) is None

    epoch = await stores.board.new_trainer_epoch()
    await streams.open_consumer(TRAJECTORIES, "r")
    deliveries = await streams.read(TRAJECTORIES, "r", count=10, block_ms=0)
    assert [dict(delivery.fields) for delivery in deliveries] == [{"a": "b"}, {"ordinal": "1"}]
    for delivery in deliveries:
        assert await streams.move(delivery, "r", SCORED, {})
    assert await streams.routed_experts(first) == b"\x00\xff"
    await streams.open_consumer(SCORED, "t")
    scored = await streams.read(SCORED, "t", count=10, block_ms=0)
    assert await streams.settle(scored, "t", epoch=epoch) == 2
    assert [await streams.routed_experts(i) for i in (first, plain)] == [None, None]
    assert [await streams.payload(i) for i in (first, plain)] == [None, None]


async def test_a_buried_trajectory_keeps_its_routed_experts_with_its_payload(stores: Stores) -> None:
    streams, trajectory_id = stores.streams, uuid7()
    await streams.append(trajectory_id, b"x", ordinal=0, sample=0, fields={}, routed_experts=b"\x01")
    await streams.open_consumer(TRAJECTORIES, "r")
    (delivery,) = await streams.read(TRAJECTORIES, "r", count=1, block_ms=0)
    assert await streams.bury(delivery, "r", "no use")
    assert (await streams.payload(trajectory_id), await streams.routed_experts(trajectory_id)) == (b"x", b"\x01")


async def test_concurrent_appends_of_one_id_make_it_durable_once(stores: Stores) -> None:
    trajectory_id = uuid7()
    appends = (stores.streams.append(trajectory_id, b"x", ordinal=0, sample=0, fields={}) for _ in range(20))
    statuses = Counter(await asyncio.gather(*appends))
    assert statuses == {AppendStatus.ACCEPTED: 1, AppendStatus.DUPLICATE: 19}
    assert (await stores.streams.depth(TRAJECTORIES)).length == 1


async def test_the_first_durable_trajectory_of_an_ordinal_wins(stores: Stores) -> None:
    streams = stores.streams
    ids = [uuid7() for _ in range(10)]
    statuses = await asyncio.gather(*(streams.append(i, i.encode(), ordinal=4, sample=0, fields={}) for i in ids))
    assert Counter(statuses) == {AppendStatus.ACCEPTED: 1, AppendStatus.SUPERSEDED: 9}
    for trajectory_id, status in zip(ids, statuses, strict=True):
        kept = trajectory_id.encode() if status is AppendStatus.ACCEPTED else None
        assert await streams.payload(trajectory_id) == kept


async def test_an_ordinal_stays_superseded_when_the_frontier_has_passed_it(stores: Stores) -> None:
    for ordinal in (2, 0, 1, 3):
        await stores.append(ordinal)
    assert (await stores.ledger.state(0)).frontier_ordinal == 4
    for ordinal in range(4):
        late = await stores.streams.append(uuid7(), b"late", ordinal=ordinal, sample=0, fields={})
        assert late is AppendStatus.SUPERSEDED


async def test_each_wanted_sample_of_an_ordinal_has_its_own_winner(store_url: str | None) -> None:
    async with open_stores(store_url, samples=2) as stores:
        await stores.append(0, sample=0)
        await stores.append(0, sample=1)
        late = await stores.streams.append(uuid7(), b"", ordinal=0, sample=1, fields={})
        assert late is AppendStatus.SUPERSEDED
        with pytest.raises(ValueError, match=r"sample 2.*expected.*0\.\.1"):
            await stores.append(0, sample=2)


async def test_consumers_share_a_stream_without_overlap(stores: Stores) -> None:
    ids = [await stores.append(ordinal) for ordinal in range(6)]
    await stores.streams.open_consumer(TRAJECTORIES, "a")
    await stores.streams.open_consumer(TRAJECTORIES, "b")
    first = await stores.streams.read(TRAJECTORIES, "a", count=4, block_ms=0)
    second = await stores.streams.read(TRAJECTORIES, "b", count=4, block_ms=0)
    assert [d.trajectory_id for d in (*first, *second)] == ids


async def test_a_waiting_reader_gets_what_arrives(stores: Stores) -> None:
    await stores.streams.open_consumer(TRAJECTORIES, "r")
    reader = asyncio.create_task(stores.streams.read(TRAJECTORIES, "r", count=1, block_ms=30_000))
    await asyncio.sleep(0)
    trajectory_id = await stores.append(0)
    (delivery,) = await asyncio.wait_for(reader, 2)
    assert delivery.trajectory_id == trajectory_id


async def test_a_reader_waits_no_longer_than_asked(stores: Stores) -> None:
    await stores.streams.open_consumer(TRAJECTORIES, "r")
    assert await asyncio.wait_for(stores.streams.read(TRAJECTORIES, "r", count=1, block_ms=20), 2) == []


async def test_a_restarted_consumer_first_gets_its_own_unsettled_deliveries_once(stores: Stores) -> None:
    streams = stores.streams
    ids = [await stores.append(ordinal) for ordinal in range(7)]
    await streams.open_consumer(TRAJECTORIES, "r")
    before = await streams.read(TRAJECTORIES, "r", count=5, block_ms=0)
    assert await streams.move(before[1], "r", SCORED, {})

    await streams.open_consumer(TRAJECTORIES, "r")
    after = await read_all(streams, TRAJECTORIES, "r")

    assert [d.trajectory_id for d in after] == [ids[0], *ids[2:]]
    assert [d.attempt for d in after] == [2, 2, 2, 2, 1, 1]


async def test_a_restarted_consumer_leaves_others_deliveries_alone(stores: Stores) -> None:
    streams = stores.streams
    await stores.append(0)
    mine = await stores.append(1)
    await streams.open_consumer(TRAJECTORIES, "other")
    await streams.read(TRAJECTORIES, "other", count=1, block_ms=0)
    await streams.open_consumer(TRAJECTORIES, "r")
    assert [d.trajectory_id for d in await read_all(streams, TRAJECTORIES, "r")] == [mine]


async def test_claims_count_attempts_and_respect_the_idle_time(stores: Stores) -> None:
    streams = stores.streams
    ids = [await stores.append(ordinal) for ordinal in range(3)]
    await streams.open_consumer(TRAJECTORIES, "a")
    await read_all(streams, TRAJECTORIES, "a")

    assert await streams.claim(TRAJECTORIES, "b", idle_ms=3_600_000, count=10) == []
    for attempt in (2, 3, 4):
        claimed = await streams.claim(TRAJECTORIES, "b", idle_ms=0, count=2)
        assert [(d.trajectory_id, d.attempt) for d in claimed] == [(i, attempt) for i in ids[:2]]


async def test_claim_on_a_stream_nobody_has_read_is_empty(stores: Stores) -> None:
    await stores.append(0)
    assert await stores.streams.claim(TRAJECTORIES, "r", idle_ms=0, count=1) == []


async def test_move_hands_over_with_new_fields_and_a_fresh_count(stores: Stores) -> None:
    streams = stores.streams
    trajectory_id = await stores.append(0, payload=b"kept")
    await streams.open_consumer(TRAJECTORIES, "r")
    await streams.read(TRAJECTORIES, "r", count=1, block_ms=0)
    (delivery,) = await streams.claim(TRAJECTORIES, "r", idle_ms=0, count=1)
    assert await streams.move(delivery, "r", SCORED, {"outcome": "{}"})

    await streams.open_consumer(SCORED, "t")
    (scored,) = await streams.read(SCORED, "t", count=5, block_ms=0)
    assert (scored.trajectory_id, scored.fields, scored.attempt) == (trajectory_id, {"outcome": "{}"}, 1)
    assert (await streams.depth(TRAJECTORIES)).length == 0
    assert await streams.payload(trajectory_id) == b"kept"
    assert await streams.unconsumed() == 1
    assert not await streams.move(delivery, "r", SCORED, {})


@pytest.mark.parametrize("successor", ["b", "a"], ids=["another-name", "same-name"])
async def test_a_consumer_that_lost_its_delivery_moves_nothing(stores: Stores, successor: str) -> None:
    streams = stores.streams
    trajectory_id = await stores.append(0)
    await streams.open_consumer(TRAJECTORIES, "a")
    (stale,) = await streams.read(TRAJECTORIES, "a", count=1, block_ms=0)
    (fresh,) = await streams.claim(TRAJECTORIES, successor, idle_ms=0, count=1)

    assert not await streams.move(stale, "a", SCORED, {"outcome": "stale"})
    assert not await streams.bury(stale, "a", "stale")
    assert await streams.settle([stale], "a", epoch=1) == 0
    assert (await streams.depth(SCORED)).length == 0
    assert await streams.dead_letters(count=1) == []
    assert await streams.payload(trajectory_id) is not None
    assert await streams.unconsumed() == 1

    assert await streams.move(fresh, successor, SCORED, {"outcome": "fresh"})
    assert not await streams.move(stale, "a", SCORED, {"outcome": "stale"})
    assert (await streams.depth(SCORED)).length == 1


async def test_a_buried_entry_keeps_its_payload_and_releases_its_admission(stores: Stores) -> None:
    streams = stores.streams
    first, second = await stores.append(0, payload=b"one"), await stores.append(1)
    await streams.open_consumer(TRAJECTORIES, "r")
    for delivery, reason in zip(await read_all(streams, TRAJECTORIES, "r"), ("broken", "late"), strict=True):
        assert await streams.bury(delivery, "r", reason)

    letters = await streams.dead_letters(count=10)
    assert [(d.trajectory_id, d.reason, d.stream, d.attempt) for d in letters] == [
        (second, "late", TRAJECTORIES, 1),
        (first, "broken", TRAJECTORIES, 1),
    ]
    assert letters[0].buried_ms >= letters[1].buried_ms > 1_700_000_000_000
    assert await streams.dead_letters(count=1) == letters[:1]
    assert await streams.payload(first) == b"one"
    assert await streams.unconsumed() == 0
    assert (await streams.depth(TRAJECTORIES)).length == 0


async def test_marking_consumed_is_idempotent_and_leaves_the_entry(stores: Stores) -> None:
    streams = stores.streams
    first, _ = await stores.append(0), await stores.append(1)
    await streams.mark_consumed([first])
    await streams.mark_consumed([first, uuid7()])
    await streams.mark_consumed([])
    assert await streams.unconsumed() == 1
    assert (await streams.depth(TRAJECTORIES)).length == 2
    assert await streams.payload(first) is not None


async def test_settle_deletes_entries_and_payloads_that_are_still_owned(stores: Stores) -> None:
    streams = stores.streams
    ids = [await stores.append(ordinal) for ordinal in range(3)]
    await streams.open_consumer(TRAJECTORIES, "t")
    deliveries = await read_all(streams, TRAJECTORIES, "t")
    epoch = await stores.board.new_trainer_epoch()

    assert await streams.settle(deliveries[:2], "t", epoch=epoch) == 2
    assert await streams.settle(deliveries, "t", epoch=epoch) == 1
    assert await streams.settle([], "t", epoch=epoch) == 0

    assert [await streams.payload(i) for i in ids] == [None] * 3
    assert await streams.unconsumed() == 0
    assert (await streams.depth(TRAJECTORIES)).length == 0


async def test_an_older_trainer_settles_nothing(stores: Stores) -> None:
    streams = stores.streams
    trajectory_id = await stores.append(0)
    await streams.open_consumer(TRAJECTORIES, "t")
    deliveries = await streams.read(TRAJECTORIES, "t", count=1, block_ms=0)
    old, new = await stores.board.new_trainer_epoch(), await stores.board.new_trainer_epoch()

    for owned in (deliveries, []):
        with pytest.raises(FencedError, match=f"epoch {old} is fenced: epoch {new}"):
            await streams.settle(owned, "t", epoch=old)

    assert await streams.payload(trajectory_id) is not None
    assert await streams.settle(deliveries, "t", epoch=new) == 1


async def test_depth_tells_length_pending_and_age(stores: Stores) -> None:
    streams = stores.streams
    empty = await streams.depth(TRAJECTORIES)
    assert (empty.length, empty.pending, empty.oldest_age_s) == (0, 0, 0.0)
    for ordinal in range(3):
        await stores.append(ordinal)
    assert (await streams.depth(TRAJECTORIES)).pending == 0
    await streams.open_consumer(TRAJECTORIES, "r")
    await streams.read(TRAJECTORIES, "r", count=2, block_ms=0)
    depth = await streams.depth(TRAJECTORIES)
    assert (depth.length, depth.pending) == (3, 2)
    assert 0 <= depth.oldest_age_s < 60


STEP = st.tuples(
    st.sampled_from(["append", "read", "claim", "reopen", "move", "rescore", "bury", "settle", "requeue", "drop"]),
    st.sampled_from(["a", "b"]),
    st.integers(0, 5),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, max_size=40))
def test_every_accepted_trajectory_is_in_exactly_one_place(store_url: str | None, steps: list[Any]) -> None:
    """Whatever consumers do, also with deliveries that they have lost: nothing vanishes, nothing doubles."""
    asyncio.run(_one_place(store_url, steps))


async def _one_place(store_url: str | None, steps: list[tuple[str, str, int]]) -> None:
    async with open_stores(store_url) as stores:
        streams, deliveries, accepted = stores.streams, list[tuple[str, Delivery]](), set[str]()
        buried, gone = list[DeadLetter](), 0
        for number, (action, consumer, pick) in enumerate(steps):
            stream = TRAJECTORIES if pick % 2 else SCORED
            who, delivery = deliveries[pick % len(deliveries)] if deliveries else ("", None)
            if action == "append":
                accepted.add(await stores.append(number))
            elif action == "reopen":
                await streams.open_consumer(stream, consumer)
            elif action == "read":
                read = await streams.read(stream, consumer, count=2, block_ms=0)
                deliveries += [(consumer, d) for d in read]
            elif action == "claim":
                claimed = await streams.claim(stream, consumer, idle_ms=0, count=2)
                deliveries += [(consumer, d) for d in claimed]
            elif action in {"requeue", "drop"}:
                buried += await streams.dead_letters(count=1)
                letter = buried[pick % len(buried)] if buried else None  # perhaps of long ago
                if letter is not None and action == "requeue":
                    await streams.requeue_dead(letter)
                elif letter is not None:
                    gone += await streams.drop_dead(letter)
            elif delivery is None:
                continue
            elif action == "bury":
                await streams.bury(delivery, who, "test")
            elif action == "settle":
                gone += await streams.settle([delivery], who, epoch=1)
            else:
                await streams.move(delivery, who, SCORED if action == "move" else TRAJECTORIES, {})
        places = [d.trajectory_id for d in await streams.dead_letters(count=100)]
        for stream in StreamName:
            await streams.open_consumer(stream, "auditor")
            found = await streams.claim(stream, "auditor", idle_ms=0, count=100)
            found += await read_all(streams, stream, "auditor")
            places += [d.trajectory_id for d in {d.entry_id: d for d in found}.values()]
        assert len(places) == len(set(places))
        assert set(places) <= accepted
        assert len(places) + gone == len(accepted)


async def test_nothing_is_accepted_or_leased_before_a_trainer_has_claimed_the_store(store_url: str | None) -> None:
    async with open_stores(store_url, claimed=False) as stores:
        trajectory_id = uuid7()
        for call in (
            stores.streams.append(trajectory_id, b"payload", ordinal=0, sample=0, fields={}),
            stores.ledger.lease("w", 1, limit=9, now_ms=1, ttl_ms=1, deadline_ms=9),
        ):
            with pytest.raises(StreamUnavailableError, match="no trainer has claimed this store"):
                await call
        assert await stores.streams.unconsumed() == 0
        await stores.board.new_trainer_epoch()
        status = await stores.streams.append(trajectory_id, b"payload", ordinal=0, sample=0, fields={})
        assert status is AppendStatus.ACCEPTED
        (lease,) = await stores.ledger.lease("w", 1, limit=9, now_ms=1, ttl_ms=1, deadline_ms=9)
        assert lease.ordinal == 1


async def test_what_was_appended_is_recognised_whatever_became_of_it(stores: Stores) -> None:
    settled, waiting = await stores.append(0), await stores.append(1)
    await stores.streams.open_consumer(TRAJECTORIES, "r")
    (delivery, _) = await stores.streams.read(TRAJECTORIES, "r", count=2, block_ms=0)
    assert await stores.streams.settle([delivery], "r", epoch=await stores.board.epoch()) == 1
    asked = [settled, waiting, *(uuid7() for _ in range(1500))]
    assert await stores.streams.recognised(asked) == {settled, waiting}
    assert await stores.streams.recognised([]) == set()


@given(
    done=st.sets(st.integers(0, 30)),
    appended=st.sets(st.integers(0, 12)),
    leased=st.integers(0, 12),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_restored_slots_are_done_as_if_they_had_been_appended(
    store_url: str | None, done: set[int], appended: set[int], leased: int
) -> None:
    async with open_stores(store_url) as stores:
        for ordinal in appended:
            await stores.append(ordinal)
        await stores.ledger.lease("w", leased, limit=100, now_ms=1, ttl_ms=1, deadline_ms=9)
        slots = Slots()
        for slot in done:
            slots.add(slot)

        for _ in range(2):  # a start that was killed does it again
            await stores.streams.restore(slots)

        expected = done | appended
        state = await stores.ledger.state(now_ms=1)
        assert state.frontier_ordinal == next(n for n in range(100) if n not in expected)
        for slot in sorted(done - appended):
            status = await stores.streams.append(uuid7(), b"", ordinal=slot, sample=0, fields={})
            assert status is AppendStatus.SUPERSEDED
        leases = await stores.ledger.lease("v", 50, limit=100, now_ms=5, ttl_ms=1, deadline_ms=9)
        granted = [one.ordinal for one in leases]
        assert not expected & set(granted)
        assert set(range(max([*granted, 0]))) <= expected | set(granted)


async def test_an_erased_trajectory_leaves_a_mark_and_turns_its_holder_away(stores: Stores) -> None:
    streams = stores.streams
    erased, other = await stores.append(0), await stores.append(1)
    await streams.open_consumer(StreamName.TRAJECTORIES, "r")
    held, _ = await streams.read(StreamName.TRAJECTORIES, "r", count=2, block_ms=0)
    assert held.trajectory_id == erased

    found = await streams.erase(erased, {"ordinal": "0"})
    assert (found.payload, found.entries, found.waiting, found.dead_letters) == (1, 1, 0, 0)
    assert not await streams.move(held, "r", StreamName.SCORED, {})
    assert not await streams.bury(held, "r", "invalid: too late")
    assert await streams.payload(erased) is None
    assert await streams.payload(other) == b"payload"
    assert await streams.unconsumed() == 1
    (mark,) = await streams.newest(StreamName.SCORED, count=9)
    assert (mark.trajectory_id, dict(mark.fields)) == (erased, {FORGOTTEN: "1", "ordinal": "0"})

    assert not (await streams.erase(erased, {"ordinal": "0"})).anything, "the mark is no text, and stays"
    assert len(await streams.newest(StreamName.SCORED, count=9)) == 1
    assert await streams.recognised([erased]) == {erased}
    again = await streams.append(erased, b"again", ordinal=0, sample=0, fields={})
    assert again is AppendStatus.DUPLICATE


async def test_what_was_never_seen_is_not_taken_after_it_was_erased(stores: Stores) -> None:
    streams, never = stores.streams, uuid7()
    assert not (await streams.erase(never, {})).anything
    assert await streams.newest(StreamName.SCORED, count=9) == []
    status = await streams.append(never, b"late", ordinal=4, sample=0, fields={})
    assert status is AppendStatus.DUPLICATE
    assert await streams.payload(never) is None
