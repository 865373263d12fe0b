"""A trainer that starts on a store which has forgotten: what is lost is named and leased again, the rest is done."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import cast

import pytest

from sao.accepted import LOST_FILE, AcceptedLog
from sao.board.base import TrainerFacts
from sao.board.memory import MemoryBoard
from sao.streams.base import AppendStatus, StoreEmptiedError, StreamName, StreamUnavailableError
from sao.streams.memory import MemoryStreams
from sao.v1 import trajectory_pb2 as pb
from services.rollout.ingest.leases.memory import MemoryLeaseLedger
from services.trainer import loop
from tests.support.training import World, random_trajectory
from tests.unit.services.trainer.conftest import NewWorld
from tests.unit.services.trainer.test_loop import rows


def messages(world: World, count: int) -> list[pb.Trajectory]:
    """Trajectories with ids, that can be delivered to more than one store."""
    return [random_trajectory(random.Random(seed), world.config.run.name) for seed in range(count)]


async def deliver(world: World, *trajectories: pb.Trajectory, first: int) -> list[str]:
    """Put them on the scored stream from this ordinal on, and write them down as ingest does."""
    log = AcceptedLog(world.config.run.dir)
    for ordinal, trajectory in enumerate(trajectories, start=first):
        await world.deliver(trajectory, place=(ordinal, 0))
        log.note(trajectory.id, ordinal)
    log.close()
    return [trajectory.id for trajectory in trajectories]


def empty(world: World) -> MemoryBoard:
    """Restart the store without its file."""
    board = MemoryBoard()
    world.board, world.streams = board, MemoryStreams(board, samples=world.config.samples)
    return board


async def leased(world: World, count: int) -> list[int]:
    ledger = MemoryLeaseLedger(cast("MemoryStreams", world.streams))
    return [one.ordinal for one in await ledger.lease("w", count, limit=99, now_ms=1, ttl_ms=9, deadline_ms=99)]


def told(world: World) -> list[Mapping[str, object]]:
    path = world.config.run.dir / LOST_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_what_waited_is_named_and_leased_again_and_what_was_trained_is_not(new_world: NewWorld) -> None:
    world = new_world("run.updates=9", "checkpoint.every_updates=1")
    ids = await deliver(world, *messages(world, 7), first=0)
    await (await world.start()).run_updates(2)
    empty(world)
    with pytest.raises(StreamUnavailableError, match="no trainer has claimed"):
        await leased(world, 1)

    await world.start()

    assert [(row["trajectory"], row["ordinal"]) for row in told(world)] == [(ids[n], n) for n in (4, 5, 6)]
    assert await leased(world, 5) == [4, 5, 6, 7, 8]
    again = await world.streams.append(ids[0], b"a spool still had it", ordinal=0, sample=0, fields={})
    assert again is AppendStatus.SUPERSEDED


async def test_what_waited_for_feedback_is_named_like_anything_else(new_world: NewWorld) -> None:
    world = new_world("run.updates=9", "checkpoint.every_updates=1")
    trained = await deliver(world, *messages(world, 2), first=0)
    (message,) = messages(world, 3)[2:]
    await world.streams.append(message.id, message.SerializeToString(), ordinal=2, sample=0, fields={})
    await world.streams.open_consumer(StreamName.TRAJECTORIES, "reward")
    (delivery,) = await world.streams.read(StreamName.TRAJECTORIES, "reward", count=9, block_ms=0)
    assert await world.streams.room.park(delivery, "reward", {}, now_ms=1)
    log = AcceptedLog(world.config.run.dir)
    log.note(message.id, 2)
    log.close()
    await (await world.start()).run_updates(1)
    await world.start()
    assert trained
    assert told(world) == [], "while it waits it is not lost"

    empty(world)
    await world.start()

    assert [(row["trajectory"], row["ordinal"]) for row in told(world)] == [(message.id, 2)]
    assert await leased(world, 2) == [2, 3]


async def test_what_was_archived_and_not_checkpointed_trains_again_and_is_not_lost(new_world: NewWorld) -> None:
    world = new_world("run.updates=9", "checkpoint.every_updates=9")
    ids = await deliver(world, *messages(world, 7), first=0)
    first = await world.start()
    await first.run_until_crash(first.parts.ranks, "finish", at=3)
    empty(world)

    second = await world.start()
    await second.run_updates(2)

    assert [row["trajectory"] for row in told(world)] == ids[4:]
    assert [trained.id for row in rows(world)[-2:] for trained in row.trajectories] == ids[:4]
    assert await leased(world, 2) == [4, 5]


async def test_each_loss_is_named_once(new_world: NewWorld) -> None:
    world = new_world("run.updates=9")
    *trained, lost, lost_again = await deliver(world, *messages(world, 4), first=0)
    assert trained
    await (await world.start()).run_updates(1)
    empty(world)
    await world.start()
    await world.start()
    assert [row["trajectory"] for row in told(world)] == [lost, lost_again]

    (replacement,) = await deliver(world, random_trajectory(random.Random(9), "unit"), first=2)
    empty(world)
    await world.start()
    assert [row["trajectory"] for row in told(world)] == [lost, lost_again, replacement]


async def test_a_store_with_its_file_has_lost_nothing(new_world: NewWorld) -> None:
    world = new_world("run.updates=9")
    await deliver(world, *messages(world, 5), first=0)
    await (await world.start()).run_updates(1)
    await (await world.start()).run_updates(1)
    assert told(world) == []


async def test_an_older_file_is_brought_up_to_date_and_nothing_trains_twice(new_world: NewWorld) -> None:
    world = new_world("run.updates=9", "checkpoint.every_updates=1")
    early, late = messages(world, 7)[:2], messages(world, 7)[2:5]
    await deliver(world, *early, first=0)
    await (await world.start()).run_updates(1)
    _, _, waiting = await deliver(world, *late, first=2)
    await (await world.start()).run_updates(1)

    # The file is of a moment in the first epoch: it still holds what has been settled since, and lacks what came later.
    board = empty(world)
    await board.new_trainer_epoch()
    for ordinal, trajectory in enumerate(early):
        await world.deliver(trajectory, place=(ordinal, 0))
    trainer = await world.start()

    assert trainer.parts.epoch == 3
    assert [row["trajectory"] for row in told(world)] == [waiting]
    fresh = await deliver(world, *messages(world, 7)[5:], first=4)
    await trainer.run_updates(1)
    assert [trained.id for trained in rows(world)[-1].trajectories] == fresh
    assert await world.streams.unconsumed() == 0


async def test_a_running_trainer_notices_and_ends(new_world: NewWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "EPOCH_S", -1.0)
    world = new_world("run.updates=9")
    await world.deliver_many(2)
    trainer = await world.start()
    await trainer.run_updates(1)
    again = await world.start()
    cast("MemoryBoard", world.board).newest_epoch = 0
    with pytest.raises(StoreEmptiedError, match="trainer epoch 2: the store knows none"):
        await again.run()


async def test_a_running_trainer_notices_an_older_file_of_its_own_epoch(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "EPOCH_S", -1.0)
    world = new_world("run.updates=9")
    await world.deliver_many(2)
    trainer = await world.start()
    older: list[TrainerFacts] = []
    real = world.board.write_trainer

    async def noting(facts: TrainerFacts) -> None:
        older.append(facts)
        await real(facts)
        if facts.update == 1:
            await real(older[0])  # what an older file holds

    monkeypatch.setattr(world.board, "write_trainer", noting)
    with pytest.raises(StoreEmptiedError, match="facts of it are update 0 of epoch 1, expected update 1"):
        await trainer.run()


async def test_versions_that_were_collected_are_known_again(new_world: NewWorld) -> None:
    """What the archive brings again, and what a spool still holds, was sampled from them."""
    world = new_world("run.updates=20", "checkpoint.every_updates=1")
    await deliver(world, *messages(world, 16), first=0)
    first = await world.start()
    await first.run_updates(8)
    assert len(first.parts.publisher.store.names()) < 9
    before = await world.board.versions()
    empty(world)

    await world.start()

    assert await world.board.versions() == before


async def test_an_older_file_of_the_newest_epoch_is_brought_up_to_date(new_world: NewWorld) -> None:
    """A trainer keeps one epoch for days: no epoch tells that this file is old."""
    world = new_world("run.updates=9", "checkpoint.every_updates=1")
    await deliver(world, *messages(world, 4), first=0)
    first = await world.start()
    await first.run_updates(2)
    before, stored = await world.board.versions(), first.parts.publisher.store.names()
    _, beginning = min(before.items())
    assert len(before) > 1

    board = empty(world)
    assert await board.new_trainer_epoch() == first.parts.epoch
    await board.announce_version(beginning)
    second = await world.start()

    assert before.items() <= (await world.board.versions()).items()
    assert set(stored) <= set(second.parts.publisher.store.names())
    assert await leased(world, 1) == [4]


@pytest.mark.parametrize("step", ["epoch", "versions", "recognised", "restore"])
@pytest.mark.parametrize("emptied_before", [False, True])
async def test_a_store_that_is_emptied_during_the_start_is_restored(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch, step: str, emptied_before: bool
) -> None:
    world = new_world("run.updates=9", "checkpoint.every_updates=1")
    ids = await deliver(world, *messages(world, 5), first=0)
    first = await world.start()
    await first.run_updates(2)
    before = await world.board.versions()
    if emptied_before:
        empty(world)
    empty_after(monkeypatch, world, step)

    second = await world.start()

    assert second.parts.epoch > first.parts.epoch
    assert before.items() <= (await world.board.versions()).items()
    assert [row["trajectory"] for row in told(world)] == ids[4:]
    assert await leased(world, 2) == [4, 5]


def empty_after(monkeypatch: pytest.MonkeyPatch, world: World, step: str) -> None:
    """Once, after this call of the store."""
    owner = cast("object", world.board if step in ("epoch", "versions") else world.streams)
    real = getattr(owner, step)

    async def emptying(*args: object) -> object:
        answer = await real(*args)
        monkeypatch.undo()
        board = MemoryBoard()
        vars(world.board).update(vars(board))
        vars(world.streams).update(vars(MemoryStreams(cast("MemoryBoard", world.board), samples=world.config.samples)))
        return answer

    monkeypatch.setattr(owner, step, emptying)
