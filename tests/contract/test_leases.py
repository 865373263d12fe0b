"""The lease contract (services/rollout/ingest/leases/base.py), on the in-memory twin and on a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sao.ids import uuid7
from sao.streams.base import AppendStatus, StreamName
from services.rollout.ingest.leases.base import Lease
from tests.support.stores import Stores, open_stores

T0 = 1_800_000_000_000
TTL, DEADLINE = 1_000, 5_000
"""Milliseconds after the grant."""


async def lease(
    stores: Stores, count: int, *, worker: str = "w", limit: int = 100, now: int = T0, ttl: int = TTL
) -> list[Lease]:
    return await stores.ledger.lease(worker, count, limit=limit, now_ms=now, ttl_ms=ttl, deadline_ms=now + DEADLINE)


def ordinals(leases: Sequence[Lease]) -> list[int]:
    return [granted.ordinal for granted in leases]


async def test_ordinals_are_given_in_order_once(stores: Stores) -> None:
    first, second = await lease(stores, 3), await lease(stores, 2, worker="v")
    assert ordinals(first) == [0, 1, 2]
    assert ordinals(second) == [3, 4]
    granted = first[0]
    assert (granted.worker_id, granted.sample, granted.attempt) == ("w", 0, 1)
    assert (granted.expires_ms, granted.deadline_ms) == (T0 + TTL, T0 + DEADLINE)
    assert len({one.lease_id for one in (*first, *second)}) == 5


async def test_what_is_leased_or_unconsumed_counts_against_the_limit(stores: Stores) -> None:
    assert len(await lease(stores, 10, limit=4)) == 4
    assert await lease(stores, 10, limit=4) == []
    done = await stores.append(0)  # leased becomes unconsumed: no room yet
    assert await lease(stores, 10, limit=4) == []
    await stores.streams.mark_consumed([done])
    assert ordinals(await lease(stores, 10, limit=4)) == [4]
    assert await lease(stores, 10, limit=2) == []
    assert await lease(stores, 0, limit=100) == []


async def test_dead_letters_release_their_place(stores: Stores) -> None:
    await lease(stores, 1, limit=1)
    await stores.append(0)
    assert await lease(stores, 1, limit=1) == []
    await stores.streams.open_consumer(StreamName.TRAJECTORIES, "r")
    (delivery,) = await stores.streams.read(StreamName.TRAJECTORIES, "r", count=1, block_ms=0)
    assert await stores.streams.bury(delivery, "r", "test")
    assert ordinals(await lease(stores, 1, limit=1)) == [1]


async def test_an_expired_ordinal_is_given_again_before_new_ones(stores: Stores) -> None:
    await lease(stores, 2)
    assert ordinals(await lease(stores, 1, now=T0 + TTL - 1)) == [2]
    again = await lease(stores, 3, worker="v", now=T0 + TTL)
    assert [(one.ordinal, one.attempt, one.worker_id) for one in again] == [(0, 2, "v"), (1, 2, "v"), (3, 1, "v")]
    third = await lease(stores, 1, now=T0 + 2 * TTL)
    assert third[0].attempt in {2, 3}


async def test_renewal_extends_a_live_lease_up_to_its_deadline(stores: Stores) -> None:
    (granted,) = await lease(stores, 1)
    now = T0
    for _ in range(5):
        now += TTL - 1
        (renewed,) = await stores.ledger.renew("w", [granted.lease_id], now_ms=now, ttl_ms=TTL)
        assert renewed.expires_ms == min(now + TTL, T0 + DEADLINE)
        assert (renewed.lease_id, renewed.ordinal, renewed.attempt) == (granted.lease_id, 0, 1)
    assert await stores.ledger.renew("w", [granted.lease_id], now_ms=T0 + DEADLINE, ttl_ms=TTL) == []
    (again,) = await lease(stores, 1, now=T0 + DEADLINE)
    assert (again.ordinal, again.attempt) == (0, 2)


async def test_only_the_holder_of_a_live_lease_renews_it(stores: Stores) -> None:
    first, second, third = await lease(stores, 3)
    await stores.append(1)
    assert await stores.ledger.renew("other", [first.lease_id], now_ms=T0, ttl_ms=TTL) == []
    asked = [third.lease_id, "nonsense", second.lease_id, "99-1", "-1-1", "9" * 5000 + "-1", first.lease_id]
    renewed = await stores.ledger.renew("w", asked, now_ms=T0 + 1, ttl_ms=TTL)
    assert ordinals(renewed) == [2, 0]

    late = T0 + 2 * TTL
    assert await stores.ledger.renew("w", [first.lease_id], now_ms=late, ttl_ms=TTL) == []
    retaken = await lease(stores, 2, now=late)
    assert {one.attempt for one in retaken} == {2}
    assert await stores.ledger.renew("w", [first.lease_id], now_ms=late, ttl_ms=TTL) == []


async def test_a_durable_trajectory_ends_the_lease_whoever_made_it(stores: Stores) -> None:
    await lease(stores, 2)
    await stores.append(0)
    state = await stores.ledger.state(T0)
    assert (state.live, state.expired, state.next_ordinal, state.frontier_ordinal) == (1, 0, 2, 1)
    again = await lease(stores, 5, limit=4, now=T0 + 2 * TTL)
    assert ordinals(again) == [1, 2, 3]
    late = await stores.streams.append(uuid7(), b"", ordinal=0, sample=0, fields={})
    assert late is AppendStatus.SUPERSEDED


async def test_done_ordinals_are_never_leased_even_when_they_never_were(stores: Stores) -> None:
    for ordinal in (0, 1, 3, 5):
        await stores.append(ordinal)
    assert ordinals(await lease(stores, 3)) == [2, 4, 6]


async def test_samples_of_an_ordinal_are_leased_one_by_one(store_url: str | None) -> None:
    async with open_stores(store_url, samples=2) as stores:
        granted = await lease(stores, 3)
        assert [(one.ordinal, one.sample) for one in granted] == [(0, 0), (0, 1), (1, 0)]
        await stores.append(0, sample=1)
        again = await lease(stores, 3, now=T0 + TTL)
        assert [(one.ordinal, one.sample, one.attempt) for one in again] == [(0, 0, 2), (1, 0, 2), (1, 1, 1)]


async def test_a_deadline_in_the_past_is_refused(stores: Stores) -> None:
    with pytest.raises(ValueError, match="deadline_ms 300000 is not after"):
        await stores.ledger.lease("w", 1, limit=1, now_ms=T0, ttl_ms=TTL, deadline_ms=300_000)


async def test_concurrent_workers_never_share_a_live_ordinal(stores: Stores) -> None:
    async def work(worker: str) -> list[Lease]:
        return [granted for _ in range(10) for granted in await lease(stores, 3, worker=worker, limit=60)]

    granted = [one for leases in await asyncio.gather(*(work(f"w{i}") for i in range(8))) for one in leases]
    assert sorted(ordinals(granted)) == list(range(60))
    again = await asyncio.gather(*(lease(stores, 20, worker=f"v{i}", limit=60, now=T0 + TTL) for i in range(5)))
    assert sorted(one.ordinal for leases in again for one in leases) == list(range(60))
    assert {one.attempt for leases in again for one in leases} == {2}


@dataclass
class Model:
    """The ledger as one would explain it: a list of who holds what until when, and a set of what is done."""

    held: dict[int, Lease] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    unconsumed: list[str] = field(default_factory=list)

    def live(self, now: int) -> set[int]:
        return {ordinal for ordinal, one in self.held.items() if one.expires_ms > now}

    def check_grant(self, granted: Sequence[Lease], wanted: int, limit: int, now: int) -> None:
        live = self.live(now)
        expired = self.held.keys() - live
        assert len(granted) == max(0, min(wanted, limit - len(live) - len(self.unconsumed)))
        given = ordinals(granted)
        assert len(set(given)) == len(given)
        assert not set(given) & (live | self.done)
        new = [ordinal for ordinal in given if ordinal not in expired]
        assert not new or expired <= set(given)
        fresh = (ordinal for ordinal in range(10_000) if ordinal not in self.done and ordinal not in self.held)
        assert new == [next(fresh) for _ in new]
        for one in granted:
            assert one.attempt == self.attempts.get(one.ordinal, 0) + 1
            self.attempts[one.ordinal] = one.attempt
            self.held[one.ordinal] = one


OPERATION = st.one_of(
    st.tuples(st.just("lease"), st.integers(0, 4), st.integers(0, 8)),
    st.tuples(st.just("renew"), st.integers(0, 1), st.integers(0, 30)),
    st.tuples(st.just("append"), st.integers(0, 10), st.just(0)),
    st.tuples(st.just("consume"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("wait"), st.sampled_from([1, TTL - 1, TTL, DEADLINE]), st.just(0)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(OPERATION, max_size=40))
def test_the_ledger_follows_the_model(store_url: str | None, operations: list[tuple[str, int, int]]) -> None:
    asyncio.run(_follow(store_url, operations))


async def _follow(store_url: str | None, operations: Sequence[tuple[str, int, int]]) -> None:
    async with open_stores(store_url) as stores:
        model, now, issued = Model(), T0, list[Lease]()
        for step, (name, amount, pick) in enumerate(operations):
            if name == "lease":
                granted = await lease(stores, amount, worker=f"w{step % 2}", limit=pick, now=now)
                model.check_grant(granted, amount, pick, now)
                issued += granted
            elif name == "renew" and issued:
                one, worker = issued[pick % len(issued)], f"w{amount}"
                current = model.held.get(one.ordinal)
                holds = current is not None and current.lease_id == one.lease_id and one.worker_id == worker
                renewed = await stores.ledger.renew(worker, [one.lease_id], now_ms=now, ttl_ms=TTL)
                assert bool(renewed) == (holds and one.ordinal in model.live(now))
                model.held.update({after.ordinal: after for after in renewed})
            elif name == "append":
                trajectory_id = uuid7()
                status = await stores.streams.append(trajectory_id, b"", ordinal=amount, sample=0, fields={})
                expected = AppendStatus.SUPERSEDED if amount in model.done else AppendStatus.ACCEPTED
                assert status is expected
                if status is AppendStatus.ACCEPTED:
                    model.done.add(amount)
                    model.held.pop(amount, None)
                    model.unconsumed.append(trajectory_id)
            elif name == "consume":
                consumed, model.unconsumed = model.unconsumed[:amount], model.unconsumed[amount:]
                await stores.streams.mark_consumed(consumed)
            elif name == "wait":
                now += amount
            state = await stores.ledger.state(now)
            live = len(model.live(now))
            assert (state.live, state.expired) == (live, len(model.held) - live)
            assert state.frontier_ordinal == next(o for o in range(10_000) if o not in model.done)
            assert await stores.streams.unconsumed() == len(model.unconsumed)
