"""What only a real server can show: the memory bound, sudden death, lost groups, silent networks, lost answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis import asyncio as aioredis
from redis.exceptions import ConnectionError as RedisConnectionError

from sao.board.base import EngineFacts, EngineState, TrainerFacts, TrainerState, VersionRecord
from sao.config.schema import RedisSection
from sao.ids import uuid7
from sao.preference import PreferenceDocument
from sao.redis_client import RunKeys, connect_redis
from sao.streams.base import Delivery, StreamFullError, StreamName, StreamUnavailableError
from sao.streams.redis import RedisStreams
from sao.streams.redis_reader import GROUP
from tests.support.processes import free_port
from tests.support.stores import Stores, redis_stores
from tests.support.valkey import valkey

TRAJECTORIES, SCORED = StreamName.TRAJECTORIES, StreamName.SCORED
RUN = "durable"


@pytest.fixture
async def raw(valkey_url: str) -> AsyncIterator[aioredis.Redis]:
    client = aioredis.Redis.from_url(valkey_url, protocol=2)
    yield client
    await client.aclose()


@pytest.fixture
async def redis_run(valkey_url: str) -> AsyncIterator[tuple[Stores, RunKeys]]:
    run = f"durability-{uuid7()}"
    async with redis_stores(valkey_url, run=run) as stores:
        yield stores, RunKeys(run)


async def fill(stores: Stores) -> list[str]:
    """Append until the store is full; the ids that were accepted."""
    accepted: list[str] = []
    for ordinal in range(1000):
        trajectory_id = uuid7()
        try:
            await stores.streams.append(trajectory_id, b"x" * 65_536, ordinal=ordinal, sample=0, fields={})
        except StreamFullError:
            assert await stores.streams.payload(trajectory_id) is None
            return accepted
        accepted.append(trajectory_id)
    return pytest.fail("the store never filled")


async def test_a_full_store_refuses_whole_appends_and_still_drains(tmp_path: Path) -> None:
    with valkey(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as url:
        async with redis_stores(url, run=RUN) as stores:
            streams, now = stores.streams, 1_800_000_000_000
            await stores.ledger.lease("w", 1000, limit=1000, now_ms=now, ttl_ms=1000, deadline_ms=now + 9000)
            accepted = await fill(stores)

            assert await streams.memory_fraction() > 0.9
            assert await streams.unconsumed() == len(accepted)
            assert (await streams.depth(TRAJECTORIES)).length == len(accepted)
            state = await stores.ledger.state(now)
            assert (state.frontier_ordinal, state.live) == (len(accepted), 1000 - len(accepted))
            with pytest.raises(StreamFullError):
                await stores.ledger.lease("w", 1, limit=9999, now_ms=now, ttl_ms=1000, deadline_ms=now + 9000)

            # The facts of the run, renewals and everything that makes room still go through.
            epoch = await stores.board.new_trainer_epoch()
            await stores.board.write_trainer(
                TrainerFacts(epoch=epoch, update=0, version="", consumed=0, state=TrainerState.TRAINING)
            )
            await stores.board.write_engine(
                EngineFacts(engine_id="engine-0", url="http://a", state=EngineState.SERVING, version="", since_s=0)
            )
            await stores.board.announce_version(VersionRecord(name="v00000001", update=0, parent=None, epoch=epoch))
            assert (await stores.board.put_preference(PreferenceDocument(name="p", weights={"a": 1.0}))).version == 1
            live = f"{len(accepted)}-1"
            assert await stores.ledger.renew("w", [live], now_ms=now, ttl_ms=1000)
            await streams.open_consumer(TRAJECTORIES, "r")
            deliveries = await streams.read(TRAJECTORIES, "r", count=1000, block_ms=0)
            assert [d.trajectory_id for d in deliveries] == accepted
            assert await streams.read(TRAJECTORIES, "r", count=1, block_ms=1) == []
            await streams.open_consumer(TRAJECTORIES, "successor")
            deliveries = await streams.claim(TRAJECTORIES, "r", idle_ms=0, count=1000)
            assert {d.attempt for d in deliveries} == {2}
            for delivery in deliveries[:-1]:
                assert await streams.move(delivery, "r", SCORED, {"outcome": "{}"})
            assert await streams.bury(deliveries[-1], "r", "test")
            (letter,) = await streams.dead_letters(count=1)
            with pytest.raises(StreamFullError):
                await streams.requeue_dead(letter)
            assert await streams.drop_dead(letter)
            await streams.open_consumer(SCORED, "t")
            scored = await streams.read(SCORED, "t", count=1000, block_ms=0)
            await streams.mark_consumed([scored[0].trajectory_id])
            assert await streams.settle(scored, "t", epoch=epoch) == len(accepted) - 1
            await stores.append(len(accepted))


async def test_everything_accepted_survives_sudden_death(tmp_path: Path) -> None:
    options, port, now = ("--appendfsync", "always"), free_port(), 1_800_000_000_000
    with valkey(tmp_path, *options, port=port) as url:
        async with redis_stores(url, run=RUN) as stores:
            await stores.ledger.lease("w", 8, limit=8, now_ms=now, ttl_ms=1000, deadline_ms=now + 9000)
            ids = [await stores.append(ordinal, payload=str(ordinal).encode()) for ordinal in range(6)]
            await stores.streams.open_consumer(TRAJECTORIES, "r")
            first, second, *_ = await stores.streams.read(TRAJECTORIES, "r", count=4, block_ms=0)
            assert await stores.streams.move(first, "r", SCORED, {"outcome": "{}"})
            assert await stores.streams.bury(second, "r", "test")
            await stores.streams.mark_consumed([ids[0]])
            claimed = await stores.board.new_trainer_epoch()
    # The helper ends its server with SIGKILL.
    with valkey(tmp_path, *options, port=port) as url:
        async with redis_stores(url, run=RUN) as stores:
            streams = stores.streams
            await streams.open_consumer(TRAJECTORIES, "r")
            again = await streams.read(TRAJECTORIES, "r", count=10, block_ms=0)
            fresh = await streams.read(TRAJECTORIES, "r", count=10, block_ms=0)
            assert [(d.trajectory_id, d.attempt) for d in again] == [(i, 2) for i in ids[2:4]]
            assert [(d.trajectory_id, d.attempt) for d in fresh] == [(i, 1) for i in ids[4:]]
            await streams.open_consumer(SCORED, "t")
            (scored,) = await streams.read(SCORED, "t", count=10, block_ms=0)
            assert (scored.trajectory_id, scored.fields) == (ids[0], {"outcome": "{}"})
            assert [d.trajectory_id for d in await streams.dead_letters(count=5)] == [ids[1]]
            assert [await streams.payload(i) for i in ids] == [str(n).encode() for n in range(6)]
            assert await streams.unconsumed() == 4
            state = await stores.ledger.state(now)
            assert (state.frontier_ordinal, state.live, state.next_ordinal) == (6, 2, 8)
            assert await stores.board.new_trainer_epoch() == claimed + 1


async def test_a_server_that_came_back_is_found_again(tmp_path: Path) -> None:
    port = free_port()
    with valkey(tmp_path, port=port) as url:
        async with redis_stores(url, run=RUN, timeout_s=2.0) as stores:
            await stores.append(0)
            reader = stores.streams
            await reader.open_consumer(TRAJECTORIES, "r")
            held = await reader.read(TRAJECTORIES, "r", count=1, block_ms=0)
    async with redis_stores(f"redis://127.0.0.1:{port}/0", run=RUN, timeout_s=2.0, claimed=False) as stores:
        for call in (
            stores.streams.ping(),
            stores.streams.append(uuid7(), b"", ordinal=1, sample=0, fields={}),
            stores.streams.read(TRAJECTORIES, "r", count=1, block_ms=10),
            stores.streams.move(held[0], "r", SCORED, {}),
            stores.streams.unconsumed(),
            stores.board.trainer(),
            stores.ledger.renew("w", ["0-1"], now_ms=1, ttl_ms=1),
        ):
            with pytest.raises(StreamUnavailableError, match="retry with a limit"):
                await call
        with valkey(tmp_path, port=port):
            assert await stores.streams.unconsumed() == 1
            assert await stores.streams.move(held[0], "r", SCORED, {})


async def test_a_silent_network_fails_within_the_deadline() -> None:
    connections: list[asyncio.StreamWriter] = []

    async def swallow(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with redis_stores(f"redis://127.0.0.1:{port}/0", timeout_s=0.2, claimed=False) as stores:
        started = time.monotonic()
        with pytest.raises(StreamUnavailableError):
            await stores.streams.append(uuid7(), b"x", ordinal=0, sample=0, fields={})
        assert time.monotonic() - started < 5.0
    for writer in connections:
        writer.close()
    server.close()
    await server.wait_closed()


async def test_a_lost_group_is_made_again_without_losing_or_repeating(
    redis_run: tuple[Stores, RunKeys], raw: aioredis.Redis
) -> None:
    stores, keys = redis_run
    streams = stores.streams
    ids = [await stores.append(ordinal) for ordinal in range(4)]
    await streams.open_consumer(TRAJECTORIES, "r")
    settled, *_ = await streams.read(TRAJECTORIES, "r", count=3, block_ms=0)
    assert await streams.settle([settled], "r", epoch=1) == 1
    in_hand = await streams.claim(TRAJECTORIES, "r", idle_ms=0, count=10)
    assert [(d.trajectory_id, d.attempt) for d in in_hand] == [(i, 2) for i in ids[1:3]]

    await raw.xgroup_destroy(keys.stream(TRAJECTORIES), GROUP)
    assert not await streams.move(in_hand[0], "r", SCORED, {})  # nobody owns it now
    assert await streams.claim(TRAJECTORIES, "r", idle_ms=0, count=1) == []
    later = await streams.read(TRAJECTORIES, "r", count=10, block_ms=0)

    # The refused one was let go and comes again; the other is still in hand; the settled one is gone.
    assert [d.trajectory_id for d in later] == [ids[1], ids[3]]
    assert await streams.move(in_hand[1], "r", SCORED, {})
    for delivery in later:
        assert await streams.move(delivery, "r", SCORED, {})


async def test_after_a_lost_group_only_the_new_owner_moves_an_entry(
    redis_run: tuple[Stores, RunKeys], raw: aioredis.Redis
) -> None:
    stores, keys = redis_run
    streams = stores.streams
    await stores.append(0)
    await streams.open_consumer(TRAJECTORIES, "a")
    (stale,) = await streams.read(TRAJECTORIES, "a", count=1, block_ms=0)
    await raw.xgroup_destroy(keys.stream(TRAJECTORIES), GROUP)
    (fresh,) = await streams.read(TRAJECTORIES, "b", count=1, block_ms=0)
    assert fresh.attempt == stale.attempt == 1
    assert not await streams.move(stale, "a", SCORED, {})
    assert await streams.move(fresh, "b", SCORED, {})


async def test_deliveries_whose_answer_was_lost_come_with_the_next_read(
    redis_run: tuple[Stores, RunKeys], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, _ = redis_run
    streams = stores.streams
    assert isinstance(streams, RedisStreams)
    ids = [await stores.append(ordinal) for ordinal in range(3)]
    await streams.open_consumer(TRAJECTORIES, "r")
    (in_hand,) = await streams.read(TRAJECTORIES, "r", count=1, block_ms=0)
    ask = streams._once.xreadgroup

    async def ask_and_lose(*args: Any, **kwargs: Any) -> None:
        await ask(*args, **kwargs)
        raise RedisConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(streams._once, "xreadgroup", ask_and_lose)
        with pytest.raises(StreamUnavailableError):
            await streams.read(TRAJECTORIES, "r", count=1, block_ms=0)

    found: list[Delivery] = []
    while batch := await streams.read(TRAJECTORIES, "r", count=10, block_ms=0):
        found += batch
    assert [(d.trajectory_id, d.attempt) for d in found] == [(ids[1], 2), (ids[2], 1)]
    assert await streams.move(in_hand, "r", SCORED, {})


async def test_two_processes_of_one_consumer_name_move_an_entry_once(valkey_url: str) -> None:
    run = f"durability-{uuid7()}"
    async with redis_stores(valkey_url, run=run) as stopped, redis_stores(valkey_url, run=run) as successor:
        await stopped.append(0)
        await stopped.streams.open_consumer(TRAJECTORIES, "reward-0")
        (stale,) = await stopped.streams.read(TRAJECTORIES, "reward-0", count=1, block_ms=0)
        await successor.streams.open_consumer(TRAJECTORIES, "reward-0")
        (fresh,) = await successor.streams.read(TRAJECTORIES, "reward-0", count=1, block_ms=0)
        assert not await stopped.streams.move(stale, "reward-0", SCORED, {})
        assert await successor.streams.move(fresh, "reward-0", SCORED, {})
        assert (await successor.streams.depth(SCORED)).length == 1


async def test_all_keys_of_a_run_share_one_hash_slot_and_ids_expire(
    redis_run: tuple[Stores, RunKeys], raw: aioredis.Redis
) -> None:
    stores, keys = redis_run
    await stores.append(0)
    await stores.append(2)
    now = 1_800_000_000_000
    await stores.ledger.lease("w", 2, limit=9, now_ms=now, ttl_ms=10, deadline_ms=now + 10)
    await stores.board.new_trainer_epoch()
    names = [name async for name in raw.scan_iter(match=keys.key("*").replace("{", "?").replace("}", "?"))]
    assert len(names) >= 8
    assert all(name.startswith(b"sao:{" + keys.run.encode() + b"}:") for name in names)
    (seen,) = [name for name in names if b":seen:" in name]
    assert 25 * 3600 < await raw.ttl(seen) <= 26 * 3600


async def test_winners_below_the_frontier_and_ended_leases_are_forgotten(
    redis_run: tuple[Stores, RunKeys], raw: aioredis.Redis
) -> None:
    stores, keys = redis_run
    now = 1_800_000_000_000
    await stores.ledger.lease("w", 4, limit=9, now_ms=now, ttl_ms=10, deadline_ms=now + 10)
    for ordinal in (3, 1, 2):
        await stores.append(ordinal)
    assert await raw.zcard(keys.winners) == 3
    await stores.append(0)
    assert await raw.zcard(keys.winners) == 0
    assert await raw.get(keys.frontier) == b"4"
    assert not await raw.exists(keys.leases, keys.lease_expiry)


async def test_a_preference_sent_twice_is_stored_once(
    redis_run: tuple[Stores, RunKeys], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, _ = redis_run
    monkeypatch.setattr("sao.board.redis.secrets.token_hex", lambda _: "same request")
    document = PreferenceDocument(name="p", weights={"a": 1.0})
    for _ in range(2):
        assert (await stores.board.put_preference(document, if_version=0)).version == 1


async def test_a_preference_sent_twice_is_stored_once_though_others_came_between(
    redis_run: tuple[Stores, RunKeys], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, _ = redis_run
    ids = iter(["mine", *map(str, range(8)), "mine", "mine"])
    monkeypatch.setattr("sao.board.redis.secrets.token_hex", lambda _: next(ids))
    document = PreferenceDocument(name="p", weights={"a": 1.0})
    first = await stores.board.put_preference(document, if_version=0)
    for _ in range(8):
        await stores.board.put_preference(document)
    again = [await stores.board.put_preference(document, if_version=version) for version in (0, None)]
    assert again == [first, first]
    newest = await stores.board.preference()
    assert newest is not None
    assert newest.version == 9


def test_connecting_sends_nothing_and_limits_its_retries() -> None:
    client = connect_redis(RedisSection(url="redis://192.0.2.1:1/0", timeout_s=1.5), retries=1)
    options = client.connection_pool.connection_kwargs
    assert (options["socket_timeout"], options["socket_connect_timeout"]) == (1.5, 1.5)
    assert options["retry"]._retries == 1


async def test_claim_finds_an_idle_entry_behind_many_busy_ones(
    redis_run: tuple[Stores, RunKeys], raw: aioredis.Redis
) -> None:
    stores, keys = redis_run
    for ordinal in range(40):
        await stores.append(ordinal)
    await stores.streams.open_consumer(TRAJECTORIES, "a")
    *_, last = await stores.streams.read(TRAJECTORIES, "a", count=40, block_ms=0)
    await raw.xclaim(keys.stream(TRAJECTORIES), GROUP, "a", 0, [last.entry_id], idle=3_600_000, justid=True)
    (claimed,) = await stores.streams.claim(TRAJECTORIES, "b", idle_ms=1_800_000, count=1)
    assert claimed.trajectory_id == last.trajectory_id
