"""What the reward service tells of a trajectory in its trace."""

from __future__ import annotations

from sao.outcome import InfraFailed, RewardOutcome, Scored, TimedOut
from sao.streams.base import Delivery
from sao.streams.room import Waiting
from sao.telemetry.traces import TRACEPARENT, Span, Tracer, context_of
from services.reward.scorer import Unfinished


def begun(tracer: Tracer, delivery: Delivery) -> Span:
    """The span of one scoring, which begins now; how long its entry has waited is told as a span of its own."""
    below = context_of(delivery.trajectory_id, delivery.fields.get(TRACEPARENT, ""))
    queued = tracer.span("queue", below, start_ns=delivery.added_ms * 1_000_000)
    queued.set(attempt=delivery.attempt)
    queued.end()
    span = tracer.span("score", below)
    span.set(attempt=delivery.attempt)
    return span


def note_outcome(span: Span, outcome: RewardOutcome | Unfinished) -> None:
    """What the scoring came to: names and numbers, for a reason is a text."""
    match outcome:
        case Unfinished():
            span.set(outcome="waits", component=outcome.waits_for)
        case Scored():
            span.set(outcome=outcome.kind, reward=outcome.value, preference=outcome.scored_under)
        case TimedOut() | InfraFailed():
            span.set(outcome=outcome.kind, component=outcome.component)
            span.fail(outcome.kind)
        case _:
            span.set(outcome=outcome.kind)
            span.fail(outcome.kind)


def note_feedback(tracer: Tracer, waiting: Waiting, outcome: str) -> None:
    """That a trajectory waits for feedback no longer, and why."""
    below = context_of(waiting.trajectory_id, waiting.fields.get(TRACEPARENT, ""))
    span = tracer.span("feedback", below, start_ns=waiting.since_ms * 1_000_000)
    span.set(outcome=outcome)
    span.end()
