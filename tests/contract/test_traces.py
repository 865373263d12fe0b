"""Every tracer records the same: in memory, and over OTLP to a real collector."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from sao.config.schema import TracesSection
from sao.ids import uuid7
from sao.telemetry import metrics
from sao.telemetry.traces.base import Recorded, SpanContext, Tracer, carried, child, context_of, new_context
from sao.telemetry.traces.memory import MemoryTracer
from sao.telemetry.traces.otlp import OtlpTracer
from tests.support.otlp import receiver
from tests.support.waiting import eventually

BOUND = 4


@dataclass(frozen=True)
class World:
    """A tracer and what became of its spans."""

    tracer: Tracer
    spans: Callable[[], list[Recorded]]
    arrivals: Callable[[], int]
    """Times that something was handed on, whether it was taken or not."""
    hold: Callable[[], None]
    go_on: Callable[[], None]

    async def recorded(self) -> list[Recorded]:
        """Everything that was ever recorded; ends the tracer."""
        await self.tracer.close()
        return self.spans()


def nothing() -> None:
    pass


@pytest.fixture(params=["memory", "otlp"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        twin = MemoryTracer(most=BOUND)
        yield World(twin, lambda: twin.spans, lambda: len(twin.spans), nothing, nothing)
        return
    with receiver() as collector:
        tracer = OtlpTracer("test", "run", TracesSection(endpoint=collector.endpoint, queue_spans=BOUND))
        yield World(
            tracer,
            lambda: [span for _, span in collector.spans],
            lambda: collector.arrivals,
            collector.hold,
            collector.go_on,
        )
        collector.go_on()
        await tracer.close()


def dropped() -> float:
    reasons = ("queue_full", "export_failed", "closed")
    return sum(float(metrics.SPANS_DROPPED.labels(reason)._value.get()) for reason in reasons)


async def test_a_span_arrives_with_all_that_was_noted(world: World) -> None:
    root, other = new_context(), new_context()
    span = world.tracer.span("train", root, start_ns=5_000, links=[other])
    span.set(reward=0.5, lag=3, outcome="taken", critic_only=True)
    span.end(7_000)

    (found,) = await world.recorded()

    assert (found.name, found.start_ns, found.end_ns, found.failure) == ("train", 5_000, 7_000, "")
    assert (found.context, found.parent_id, found.links) == (span.context, root.span_id, (other,))
    assert found.context.trace_id == root.trace_id
    assert found.attributes == {"reward": 0.5, "lag": 3, "outcome": "taken", "critic_only": True}


async def test_the_root_of_a_trajectory_has_its_id_and_no_parent(world: World) -> None:
    trajectory_id = uuid7()
    with world.tracer.span("episode", context_of(trajectory_id)) as span:
        traceparent = span.traceparent

    (found,) = await world.recorded()

    assert found.context.trace_id == trajectory_id.replace("-", "")
    assert found.parent_id == ""
    assert traceparent == f"00-{found.context.trace_id}-{found.context.span_id}-01"
    assert context_of(trajectory_id, traceparent) == found.context


async def test_what_happens_inside_hangs_below_in_other_tasks_too(world: World) -> None:
    async def turn(number: int) -> None:
        with child("generate") as span:
            span.set(turn=number)
            await asyncio.sleep(0)

    with world.tracer.span("episode", context_of(uuid7())) as root:
        await asyncio.gather(turn(1), turn(2))

    *turns, episode = sorted(await world.recorded(), key=lambda one: one.attributes.get("turn", 9))

    assert episode.context == root.context
    assert [one.parent_id for one in turns] == [root.context.span_id] * 2
    assert turns[0].context.span_id != turns[1].context.span_id


async def test_after_a_span_nothing_hangs_below_it(world: World) -> None:
    with world.tracer.span("episode", new_context()) as outer:
        with child("generate"):
            pass
        with child("environment"):
            pass
    with child("component") as stray:
        assert not stray.recording
    assert carried() == ()

    assert [one.parent_id for one in await world.recorded() if one.name != "episode"] == [outer.context.span_id] * 2


async def test_what_fails_says_how_that_is_called_and_goes_on_failing(world: World) -> None:
    with pytest.raises(LookupError), world.tracer.span("score", new_context()):
        raise LookupError("a text that nobody may read")  # noqa: EM101

    (found,) = await world.recorded()

    assert found.failure == "LookupError"
    assert found.attributes == {}


async def test_nothing_waits_for_a_collector_and_every_span_is_counted(world: World) -> None:
    before = dropped()
    world.hold()
    world.tracer.span("queue", new_context()).end()
    await eventually(lambda: world.arrivals() > 0, what="the first span on its way")

    for _ in range(3 * BOUND):
        world.tracer.span("queue", new_context()).end()
    lost = dropped() - before
    world.go_on()

    assert 2 * BOUND <= lost <= 2 * BOUND + 1
    assert len(await world.recorded()) == 3 * BOUND + 1 - lost


async def test_what_comes_after_the_end_is_dropped(world: World) -> None:
    await world.tracer.close()
    before = dropped()

    world.tracer.span("queue", new_context()).end()

    assert dropped() - before == 1
    assert world.spans() == []


async def test_what_belongs_to_nothing_is_not_recorded(world: World) -> None:
    with world.tracer.span("ingest.publish", context_of("no id")) as span, child("component"):
        span.set(outcome="refused")

    assert await world.recorded() == []


async def test_an_unknown_name_is_a_mistake(world: World) -> None:
    with pytest.raises(KeyError):
        world.tracer.span("something", new_context())
    with pytest.raises(ValueError, match="prompt"):
        world.tracer.span("score", new_context()).set(prompt="text")
    assert await world.recorded() == []


async def test_an_end_before_its_beginning_is_the_beginning(world: World) -> None:
    """The clocks of two machines."""
    world.tracer.span("queue", SpanContext("1" * 32, "2" * 16), start_ns=9_000).end(8_000)

    (found,) = await world.recorded()

    assert (found.start_ns, found.end_ns) == (9_000, 9_000)
