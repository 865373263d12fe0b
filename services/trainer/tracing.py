"""What the trainer tells of an update: a trace of its own, and a span in the trace of each trajectory it trained."""

from __future__ import annotations

from sao.board.base import VersionRecord
from sao.telemetry.traces import SpanContext, Tracer, context_of, context_of_version, new_context
from services.trainer.consumer import Taken
from services.trainer.records import FinishedUpdate


def note_update(tracer: Tracer, done: FinishedUpdate, version: str) -> None:
    """One update that has just been made; nothing where none of its trajectories is sampled.

    `version`: the one published after it; empty: none was. Each `train` links to the update, which links to them all.
    """
    places = [(taken, context_of(taken.trajectory.id, taken.trajectory.message.traceparent)) for taken in done.taken]
    sampled = [(taken, below) for taken, below in places if tracer.samples(below)]
    if not sampled:
        return
    update = new_context()
    end_ns = round(done.finished_s * 1e9)
    trained = tuple(_note_trained(tracer, taken, below, update, done) for taken, below in sampled)
    span = tracer.span(
        "update",
        SpanContext(update.trace_id),
        start_ns=min(round(taken.consumed_s * 1e9) for taken in done.taken),
        links=trained,
        span_id=update.span_id,
        always=True,
    )
    span.set(update=done.update, trajectories=len(done.taken), critic_only=done.stats.critic_only)
    if version:
        span.set(version=version)
    if done.stats.skipped:
        span.fail("skipped")
    span.end(end_ns)


def _note_trained(
    tracer: Tracer, taken: Taken, below: SpanContext, update: SpanContext, done: FinishedUpdate
) -> SpanContext:
    span = tracer.span("train", below, start_ns=round(taken.consumed_s * 1e9), links=[update])
    span.set(update=done.update, reward=taken.reward, lag=taken.lag, preference=taken.trained_under)
    span.end(round(done.finished_s * 1e9))
    return span.context


def note_version(tracer: Tracer, run: str, record: VersionRecord, began_ns: int) -> None:
    """A version that has just been published: the root of its trace, below which the rounds of engines are."""
    root = context_of_version(run, record.name)
    above = SpanContext(root.trace_id)
    span = tracer.span("version", above, start_ns=began_ns, span_id=root.span_id, always=True)
    span.set(version=record.name, update=record.update)
    span.end()
