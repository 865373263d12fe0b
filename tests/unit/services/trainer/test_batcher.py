"""Groups, whole updates and baselines between the stream and the update; what happens when members are missing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch

from sao.board.base import EngineFacts, EngineState
from sao.outcome import Scored
from sao.preference import PreferenceDocument
from sao.rows import UpdateRow, read_rows
from sao.streams.base import Delivery, StreamName, StreamUnavailableError
from services.trainer.batcher import Groups, drift
from services.trainer.consumer import Position, Refused, Taken
from services.trainer.core.update import TrajectoryStats
from tests.support.training import Trainer, World
from tests.support.waiting import eventually
from tests.unit.services.trainer.conftest import NewWorld

GRPO = ("trainer.algorithm=grpo_dis", "group.size=4", "trainer.trajectories_per_update=4")
START = Position("v00000001", 0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def groups_of(world: World) -> tuple[Groups, Clock, Trainer]:
    """The batcher of a trainer that has published its first version."""
    trainer = await world.start()
    await trainer.run_updates(0)
    clock = Clock()
    return Groups(trainer.parts.consumer, world.config.group, clock=clock), clock, trainer


async def deliver(world: World, places: Sequence[tuple[int, int, float]]) -> list[str]:
    return [await world.deliver(place=(ordinal, sample), reward=reward) for ordinal, sample, reward in places]


async def drained(groups: Groups, position: Position = START) -> list[list[Taken] | Refused]:
    """Everything that the batcher gives until nothing more comes."""
    found = []
    while (one := await groups.next(position, block_ms=0)) is not None:
        if one != []:
            found.append(one)
    return found


def advantages(group: list[Taken] | Refused) -> list[float]:
    assert isinstance(group, list)
    return [taken.tensors.advantage or 0.0 for taken in group]


def rows(world: World) -> list[UpdateRow]:
    return [row for row, _ in read_rows(world.config.run.dir / "updates.jsonl")]


async def test_groups_complete_in_any_order_of_arrival(new_world: NewWorld) -> None:
    world = new_world(*GRPO)
    groups, _, _ = await groups_of(world)
    places = [(o, s, float(s == 0)) for o, s in itertools.product(range(3), range(4))]
    random.Random(0).shuffle(places)
    await deliver(world, places)

    found = await drained(groups)

    assert len(found) == 3
    for group in found:
        assert isinstance(group, list)
        assert len({taken.trajectory.message.ordinal for taken in group}) == 1
        assert sorted(advantages(group)) == pytest.approx([-0.5, -0.5, -0.5, 1.5], rel=1e-5)
    assert groups.numbers() == {
        "groups_complete": 3.0,
        "groups_filled": 0.0,
        "groups_dropped": 0.0,
        "groups_zero_spread": 0.0,
    }
    assert sum(groups.numbers().values()) == 0, "each is told once"


async def test_a_group_that_stays_incomplete_repeats_its_valid_members(new_world: NewWorld) -> None:
    world = new_world(*GRPO)
    groups, clock, _ = await groups_of(world)
    await deliver(world, [(0, 0, 1.0), (0, 1, 0.0), (0, 3, 0.0)])
    assert await drained(groups) == []

    clock.now = world.config.group.timeout_s + 1
    (group,) = await drained(groups)

    assert isinstance(group, list)
    assert [taken.tensors.copies for taken in group] == [2, 1, 1]
    # of 1, 0, 0 and the first again: mean 1/2, variance (4 x 1/4) / 3, spread 1 / sqrt(3)
    half = math.sqrt(3) / 2
    assert advantages(group) == pytest.approx([half, -half, -half], rel=1e-5)


async def test_a_straggler_of_a_filled_group_is_let_go_at_once(new_world: NewWorld) -> None:
    world = new_world(*GRPO)
    groups, clock, trainer = await groups_of(world)
    await deliver(world, [(0, 0, 1.0), (0, 1, 0.0), (0, 3, 0.0)])
    await drained(groups)
    clock.now = world.config.group.timeout_s + 1
    assert len(await drained(groups)) == 1

    (late,) = await deliver(world, [(0, 2, 1.0)])

    assert await drained(groups) == [Refused(late, "group_late")]
    assert trainer.parts.consumer.dropped == {"group_late": 1}
    assert await world.settled([late]) == [late]


async def test_a_group_of_which_half_is_missing_is_dropped_and_loses_nothing_else(new_world: NewWorld) -> None:
    world = new_world(*GRPO)
    groups, clock, trainer = await groups_of(world)
    lost = await deliver(world, [(0, 0, 1.0), (0, 1, 0.0)])
    await drained(groups)
    clock.now = world.config.group.timeout_s + 1
    await deliver(world, [(1, s, float(s)) for s in range(4)])

    refused, group = await drained(groups)

    assert isinstance(refused, Refused)
    assert refused.reason == "group_incomplete"
    assert len(advantages(group)) == 4
    assert trainer.parts.consumer.dropped["group_incomplete"] == 2
    assert await world.settled(lost) == lost
    assert await world.streams.unconsumed() == 0


async def test_a_group_is_judged_when_it_trains_not_when_its_first_member_came(new_world: NewWorld) -> None:
    world = new_world(*GRPO, "trainer.max_lag=3")
    groups, _, _ = await groups_of(world)
    await deliver(world, [(0, s, float(s)) for s in range(3)])
    assert await drained(groups) == []
    await deliver(world, [(0, 3, 1.0)])

    (refused,) = await drained(groups, Position("v00000001", 4))

    assert isinstance(refused, Refused), "all four are four updates old by now"


async def test_members_that_an_outage_delivers_again_are_not_counted_twice(new_world: NewWorld) -> None:
    world = new_world(*GRPO)
    groups, _, trainer = await groups_of(world)
    await deliver(world, [(0, s, float(s)) for s in range(3)])
    await drained(groups)
    await trainer.parts.consumer.open()
    again = await drained(groups)
    assert [one.reason for one in again if isinstance(one, Refused)] == ["in_hand"] * 3
    await deliver(world, [(0, 3, 0.0)])

    (group,) = await drained(groups)

    assert isinstance(group, list)
    assert await trainer.parts.consumer.settle([taken.trajectory.id for taken in group]) == 4


async def test_a_whole_run_of_groups_and_its_restart_train_everything_once(new_world: NewWorld) -> None:
    world = new_world(*GRPO, "run.updates=4", "checkpoint.every_updates=2")
    await world.deliver_many(10)
    first = await world.start()
    await first.run_updates(2)
    await world.deliver_many(6)
    second = await world.start()
    await second.run()

    ids = [t.id for row in rows(world) for t in row.trajectories]
    assert len(ids) == len(set(ids)) == 16
    assert [row.metrics["groups_complete"] for row in rows(world)] == [1.0] * 4


async def test_spo_normalises_over_the_update_and_its_tracker_survives_a_restart(new_world: NewWorld) -> None:
    world = new_world("trainer.algorithm=spo", "run.updates=2", "checkpoint.every_updates=1")
    await world.deliver_many(4)
    first = await world.start()
    await first.run_updates(1)
    saved = first.parts.batcher.state()
    assert set(saved) == {"p"}
    second = await world.start()
    await second.run()
    assert second.parts.batcher.state() != saved
    third = await world.start()
    await third.run_updates(0)
    assert third.parts.batcher.state() == second.parts.batcher.state()


async def test_a_reward_that_the_algorithm_cannot_learn_from_is_dropped_and_counted(new_world: NewWorld) -> None:
    world = new_world("trainer.algorithm=spo", "run.updates=1")
    outcome = Scored(components={"right": 7.0}, value=7.0, scored_under=1, scoring_started_s=1.0)
    too_much = await world.deliver(outcome=outcome)
    await world.deliver_many(2)
    trainer = await world.start()
    await trainer.run()
    assert trainer.parts.consumer.dropped == {"reward_range": 1}
    assert await world.settled([too_much]) == [too_much]


async def test_the_moving_average_is_read_before_it_learns(new_world: NewWorld) -> None:
    world = new_world("trainer.algorithm=reinforce_ma", "trainer.trajectories_per_update=1", "run.updates=3")
    for reward in (1.0, 1.0, 0.0):
        await world.deliver(reward=reward)
    trainer = await world.start()
    await trainer.run()
    archived = [trainer.parts.archive.read(update).trajectories[0] for update in (1, 2, 3)]
    assert [set(one.advantages) for one in archived] == [{1.0}, {0.0}, {-1.0}]


async def test_synchronous_rollouts_begin_when_every_engine_serves_the_new_weights(new_world: NewWorld) -> None:
    world = new_world("trainer.algorithm=grpo_sync", "group.size=2", "run.updates=1")
    engine = EngineFacts(engine_id="e", url="http://e", state=EngineState.SERVING, version="v00000001", since_s=0.0)
    await world.board.write_engine(engine)
    await world.deliver_many(2)
    trainer = await world.start()
    run = asyncio.create_task(trainer.run())

    async def published() -> bool:
        return "v00000002" in await world.board.versions()

    await eventually(published, what="the second version")
    assert await world.streams.unconsumed() == 2, "the next two may not be sampled yet"
    await world.board.write_engine(engine.model_copy(update={"version": "v00000002"}))
    await run
    assert await world.streams.unconsumed() == 0


async def test_an_engine_that_never_comes_holds_synchronous_training_for_its_deadline_only(new_world: NewWorld) -> None:
    world = new_world("trainer.algorithm=grpo_sync", "group.size=2", "run.updates=1", "group.timeout_s=0.05")
    engine = EngineFacts(engine_id="e", url="http://e", state=EngineState.LOADING, version="v00000001", since_s=0.0)
    await world.board.write_engine(engine)
    await world.deliver_many(2)
    trainer = await world.start()
    await trainer.run()
    assert await world.streams.unconsumed() == 0


async def test_groups_outlive_a_store_that_comes_and_goes(new_world: NewWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world = new_world(*GRPO, "run.updates=3")
    await world.deliver_many(12)
    trainer = await world.start()
    read, calls = world.streams.read, itertools.count(1)

    async def sometimes(stream: StreamName, consumer: str, *, count: int, block_ms: int) -> list[Delivery]:
        if next(calls) in {3, 7, 20}:
            msg = "the store is down"
            raise StreamUnavailableError(msg)
        return await read(stream, consumer, count=count, block_ms=block_ms)

    monkeypatch.setattr(world.streams, "read", sometimes)
    await trainer.run()
    ids = [t.id for row in rows(world) for t in row.trajectories]
    assert len(ids) == len(set(ids)) == 12


def failing_once(call: Callable[..., Awaitable[Any]], at: int) -> Callable[..., Awaitable[Any]]:
    """The same call, of which the `at`-th finds the store unavailable."""
    calls = itertools.count(1)

    async def sometimes(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == at:
            msg = "the store is down"
            raise StreamUnavailableError(msg)
        return await call(*arguments, **keywords)

    return sometimes


@pytest.mark.parametrize("at", [1, 2, 4, 5, 7, 9])
@pytest.mark.parametrize("where", ["mark_consumed", "payload", "preference"])
@pytest.mark.parametrize("algorithm", [("trainer.algorithm=sao", "trainer.trajectories_per_update=4"), GRPO])
async def test_an_outage_at_any_call_loses_no_trajectory_of_the_process(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch, algorithm: tuple[str, ...], where: str, at: int
) -> None:
    world = new_world(*algorithm, "run.updates=3")
    ids = await world.deliver_many(12)
    trainer = await world.start()
    owner = world.board if where == "preference" else world.streams
    monkeypatch.setattr(owner, where, failing_once(getattr(owner, where), at))

    await trainer.run()

    assert sorted(t.id for row in rows(world) for t in row.trajectories) == sorted(ids)
    assert await world.streams.unconsumed() == 0


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_an_outage_while_a_group_is_dropped_counts_and_settles_each_member_once(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    world = new_world(*GRPO)
    groups, clock, trainer = await groups_of(world)
    lost = await deliver(world, [(0, 0, 1.0), (0, 1, 0.0)])
    await drained(groups)
    clock.now = world.config.group.timeout_s + 1
    monkeypatch.setattr(world.streams, "settle", failing_once(world.streams.settle, at))

    with contextlib.suppress(StreamUnavailableError):
        await groups.next(START, block_ms=0)
    await trainer.parts.consumer.open()
    await drained(groups)

    assert trainer.parts.consumer.dropped == {"group_incomplete": 2}
    assert await world.settled(lost) == lost
    assert trainer.parts.consumer.forgone == []


async def test_an_outage_loses_nothing_that_came_back_from_the_archive(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = new_world(*GRPO, "run.updates=2", "checkpoint.every_updates=1")
    ids = await world.deliver_many(8)
    await (await world.start()).run()
    (world.config.run.dir / "checkpoints" / "update-00000002" / "progress.json").write_text("torn")
    second = await world.start()
    monkeypatch.setattr(world.streams, "mark_consumed", failing_once(world.streams.mark_consumed, 2))

    await second.run()

    assert [t.id for t in rows(world)[-1].trajectories] == ids[4:]


async def test_a_group_waits_for_the_members_that_a_new_preference_sends_back(new_world: NewWorld) -> None:
    world = new_world(*GRPO)
    groups, clock, trainer = await groups_of(world)
    await deliver(world, [(0, 0, 1.0), (0, 1, 0.0)])
    await drained(groups)
    await world.board.put_preference(PreferenceDocument(name="new", weights={"polite": 1.0}))
    for sample in (2, 3):
        outcome = Scored(components={"polite": 1.0}, value=1.0, scored_under=2, scoring_started_s=2.0)
        await world.deliver(place=(0, sample), outcome=outcome)
    assert await drained(groups) == []
    assert trainer.parts.consumer.dropped == {}

    await score_again(world, {"polite": 0.0})
    (group,) = await drained(groups)

    assert isinstance(group, list)
    assert sorted(taken.reward for taken in group) == [0.0, 0.0, 1.0, 1.0]
    assert {taken.trained_under for taken in group} == {2}
    assert [taken.tensors.copies for taken in group] == [1] * 4
    clock.now = world.config.group.timeout_s + 1
    assert await drained(groups) == []


async def score_again(world: World, components: dict[str, float]) -> None:
    """What the reward service does with everything that was sent back to it."""
    await world.streams.open_consumer(StreamName.TRAJECTORIES, "reward")
    outcome = Scored(components=components, value=sum(components.values()), scored_under=2, scoring_started_s=3.0)
    for delivery in await world.streams.read(StreamName.TRAJECTORIES, "reward", count=9, block_ms=0):
        fields = {**delivery.fields, "outcome": outcome.model_dump_json()}
        assert await world.streams.move(delivery, "reward", StreamName.SCORED, fields)


async def test_a_stop_does_not_wait_for_engines_that_never_come(new_world: NewWorld) -> None:
    world = new_world("trainer.algorithm=grpo_sync", "group.size=2", "group.timeout_s=3600.0")
    engine = EngineFacts(engine_id="e", url="http://e", state=EngineState.LOADING, version="v00000001", since_s=0.0)
    await world.board.write_engine(engine)
    ids = await world.deliver_many(2)
    trainer = await world.start()
    await trainer.run_updates(1)
    assert await world.settled(ids) == ids


async def test_rollouts_ahead_of_their_group_stay_admitted_until_it_trains(new_world: NewWorld) -> None:
    world = new_world("trainer.algorithm=grpo_sync", "group.size=2", "run.updates=1")
    await deliver(world, [(1, 0, 1.0), (0, 0, 1.0), (0, 1, 0.0)])
    trainer = await world.start()
    await trainer.run()
    assert await world.streams.unconsumed() == 1, "one rollout of the next update is there already"


def test_drift_is_the_mean_k3_of_the_tokens_that_have_a_ratio() -> None:
    ratios_A = torch.tensor([1.0, 2.0, math.nan])
    empty = torch.zeros(0)
    stats = TrajectoryStats(1.0, 0, empty, empty, empty, ratios_A, empty)
    assert drift(stats) == pytest.approx((2 - 1 - math.log(2)) / 2)
    assert drift(TrajectoryStats(1.0, 0, empty, empty, empty, torch.tensor([math.nan]), empty)) == math.inf
