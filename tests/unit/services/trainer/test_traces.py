"""What the trainer decides about a trajectory, and the update it trained in, stand in its trace."""

from __future__ import annotations

import random

from sao.telemetry.traces import context_of_version
from sao.telemetry.traces.base import Recorded
from sao.telemetry.traces.memory import MemoryTracer
from tests.support.training import ROOT, World, random_trajectory
from tests.support.waiting import eventually
from tests.unit.services.trainer.conftest import NewWorld


async def trained(world: World, tracer: MemoryTracer, *, updates: int) -> None:
    world.tracer = tracer
    trainer = await world.start()
    await trainer.run_updates(updates)


def named(tracer: MemoryTracer, name: str) -> list[Recorded]:
    return [span for span in tracer.spans if span.name == name]


def trace_of(trajectory_id: str) -> str:
    return trajectory_id.replace("-", "")


async def test_an_update_is_a_trace_that_links_to_all_it_trained(new_world: NewWorld) -> None:
    world, tracer = new_world(), MemoryTracer()
    ids = await world.deliver_many(4)
    await trained(world, tracer, updates=2)

    updates, trains = named(tracer, "update"), named(tracer, "train")
    assert [one.attributes["update"] for one in updates] == [1, 2]
    assert len({one.context.trace_id for one in updates}) == 2
    assert [one.context.trace_id for one in trains] == list(map(trace_of, ids))
    for update in updates:
        mine = [one for one in trains if one.attributes["update"] == update.attributes["update"]]
        assert update.links == tuple(one.context for one in mine)
        assert {one.links for one in mine} == {(update.context,)}
        assert update.parent_id == ""
        assert update.start_ns == min(one.start_ns for one in mine)
    consumed = named(tracer, "consume")
    assert [(one.context.trace_id, one.attributes) for one in consumed] == [
        (trace_of(one), {"outcome": "taken", "lag": lag}) for one, lag in zip(ids, (0, 0, 1, 1), strict=True)
    ]


async def test_of_an_update_without_a_sampled_trajectory_nothing_is_told(new_world: NewWorld) -> None:
    world, tracer = new_world(), MemoryTracer(0.5)
    ids = await world.deliver_many(12)
    await trained(world, tracer, updates=6)

    sampled = [one for one in map(trace_of, ids) if int(one[-14:], 16) >= 1 << 55]
    pairs = [ids[at : at + 2] for at in range(0, 12, 2)]
    told = [any(trace_of(one) in sampled for one in pair) for pair in pairs]
    assert [one.context.trace_id for one in named(tracer, "train")] == sampled
    assert len(named(tracer, "update")) == sum(told)
    assert len(named(tracer, "version")) == 7, "a version is traced whatever is sampled"


async def test_a_version_is_the_root_that_rounds_hang_below(new_world: NewWorld) -> None:
    world, tracer = new_world(), MemoryTracer()
    await world.deliver_many(2)
    await trained(world, tracer, updates=1)

    first, second = named(tracer, "version")
    assert first.context == context_of_version(world.config.run.name, ROOT)
    assert (first.parent_id, first.attributes) == ("", {"version": ROOT, "update": 0})
    (update,) = named(tracer, "update")
    assert second.attributes == {"version": update.attributes["version"], "update": 1}


async def test_what_does_not_train_says_why_below_its_root(new_world: NewWorld) -> None:
    world, tracer = new_world("trainer.max_lag=1"), MemoryTracer()
    unknown = random_trajectory(random.Random(0), world.config.run.name, version=ROOT)
    unknown.traceparent = f"00-{trace_of(unknown.id)}-{'1' * 16}-01"
    dropped = await world.deliver(unknown, reward=float("1e9"))
    buried = await world.deliver(payload=b"damaged")
    world.tracer = tracer
    trainer = await world.start()
    trainer.parts.consumer._reward_range = (0.0, 1.0)
    await world.deliver_many(2)
    await trainer.run_updates(1)
    await eventually(lambda: len(named(tracer, "consume")) == 4, what="every decision")

    told = {one.context.trace_id: (one.parent_id, one.attributes) for one in named(tracer, "consume")}
    assert told[trace_of(dropped)] == ("1" * 16, {"outcome": "refused", "reason": "reward_range"})
    assert told[trace_of(buried)] == ("", {"outcome": "refused", "reason": "payload_damaged"})
    assert not {trace_of(dropped), trace_of(buried)} & {one.context.trace_id for one in named(tracer, "train")}
