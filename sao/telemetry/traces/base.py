"""Traces: what one trajectory went through in every service, found by its id.

- The trace id of a trajectory is its id without the dashes, so whoever has the one has the other.
- Its root is the span `episode`, whose span id travels in the trajectory's `traceparent`; every other service hangs its
  spans below that one, or has no parent where a traceparent is missing or another trajectory's.
- Which trajectories are sampled their ids decide, so every service decides alike.
- An attribute is a number or a name of ours out of `ATTRIBUTES`, never a text that somebody or a model has written.
- Recording never waits and never raises: what cannot be handed on is dropped, and counted
  (`sao_process_trace_spans_dropped_total`).

Inside a `with tracer.span(...)`, `child(...)` is a span below it, in whatever function or task that is.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Self

Value = str | int | float | bool

PREFIX = "sao."
"""Of every attribute, as a collector sees it."""
TRACEPARENT = "traceparent"
"""Name of the field of a stream's entry, and of the metadata of a call, that says where spans hang."""


class Kind(Enum):
    """OpenTelemetry's span kinds, as far as there are any here."""

    INTERNAL = "internal"
    CLIENT = "client"
    SERVER = "server"
    PRODUCER = "producer"
    CONSUMER = "consumer"


SPANS: Mapping[str, Kind] = {
    "episode": Kind.INTERNAL,
    "generate": Kind.CLIENT,
    "environment": Kind.INTERNAL,
    "publish": Kind.CLIENT,
    "ingest.publish": Kind.SERVER,
    "queue": Kind.INTERNAL,
    "score": Kind.CONSUMER,
    "component": Kind.INTERNAL,
    "feedback": Kind.INTERNAL,
    "consume": Kind.CONSUMER,
    "train": Kind.INTERNAL,
    "update": Kind.INTERNAL,
    "version": Kind.PRODUCER,
    "round": Kind.CONSUMER,
    "step": Kind.CLIENT,
}
"""Every span there is; docs/traces.md says what each one covers."""

ATTRIBUTES = frozenset(
    {
        "action_tokens",
        "attempt",
        "component",
        "critic_only",
        "engine",
        "finish",
        "lag",
        "ordinal",
        "outcome",
        "preference",
        "prompt_tokens",
        "reason",
        "reward",
        "sample",
        "step",
        "task",
        "tokens",
        "trajectories",
        "turn",
        "turns",
        "update",
        "version",
        "version_first",
        "version_last",
        "worker",
    }
)
"""Every attribute there is: one that is not here is a mistake in the code, and docs/traces.md explains each."""

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_NOT_OF_A_NAME = re.compile(r"[^A-Za-z0-9_.:/+-]")
_MOST_CHARACTERS = 128
_RANDOM_DIGITS = 14
"""At a trace id's end: W3C's random part, and random in a UUIDv7 too, whose first half tells the time."""


@dataclass(frozen=True, slots=True)
class SpanContext:
    """A place in a trace: 32 and 16 lower-case hexadecimal digits; an empty span id is above the root.

    An empty trace id is that of nothing, and never sampled.
    """

    trace_id: str
    span_id: str = ""


def context_of(trajectory_id: str, traceparent: str = "") -> SpanContext:
    """Where the spans of a trajectory hang: below its root, where the traceparent tells it."""
    try:
        trace_id = uuid.UUID(trajectory_id).hex
    except ValueError:
        return SpanContext("")
    found = _TRACEPARENT.fullmatch(traceparent)
    return SpanContext(trace_id, found[2] if found and found[1] == trace_id else "")


def context_of_version(run: str, version: str) -> SpanContext:
    """The root of a weight version's own trace, the same for whoever publishes and whoever serves it."""
    digits = hashlib.sha256(f"{run}/{version}".encode()).hexdigest()
    return SpanContext(digits[:32], digits[32:48])


def new_context() -> SpanContext:
    """The root of a trace of its own."""
    return SpanContext(secrets.token_hex(16), secrets.token_hex(8))


def sampled(trace_id: str, share: float) -> bool:
    """Whether a trace is among this share of them: OpenTelemetry's consistent probability sampling."""
    if not trace_id:
        return False
    return int(trace_id[-_RANDOM_DIGITS:], 16) >= (1 - share) * (1 << 4 * _RANDOM_DIGITS)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A span that has ended."""

    name: str
    context: SpanContext
    parent_id: str
    """Empty: it is a root."""
    start_ns: int
    """Unix time, as the end."""
    end_ns: int
    attributes: Mapping[str, Value]
    links: tuple[SpanContext, ...]
    failure: str
    """Kind of what went wrong, as `error.type`; empty: nothing did."""


Sink = Callable[[Recorded], None]


@dataclass(slots=True)
class Span:
    """One span under way: ends, and is recorded if it is sampled, with its `with` block."""

    name: str
    context: SpanContext
    parent_id: str
    sink: Sink | None
    """None: it is not sampled, or nobody records."""
    start_ns: int
    links: tuple[SpanContext, ...] = ()
    attributes: dict[str, Value] = field(default_factory=dict)
    failure: str = ""
    _before: Token[Span | None] | None = None

    @property
    def recording(self) -> bool:
        """Whether it will be recorded."""
        return self.sink is not None

    @property
    def traceparent(self) -> str:
        """What tells another service to hang its spans below this one (W3C trace context)."""
        return f"00-{self.context.trace_id}-{self.context.span_id}-{'01' if self.recording else '00'}"

    def set(self, **attributes: Value) -> None:
        """Note something about it; ValueError for an attribute that nobody has declared.

        Of a text only what a name of ours may hold is kept.
        """
        if unknown := attributes.keys() - ATTRIBUTES:
            msg = f"span {self.name}: unknown attributes {sorted(unknown)}; expected those of ATTRIBUTES"
            raise ValueError(msg)
        if self.recording:
            self.attributes |= {name: _as_name(value) for name, value in attributes.items()}

    def fail(self, kind: str) -> None:
        """Note that what it covers went wrong, and how that is called."""
        self.failure = str(_as_name(kind))

    def child(self, name: str) -> Span:
        """A new span below it, which begins now."""
        below = SpanContext(self.context.trace_id, secrets.token_hex(8))
        return Span(name, below, self.context.span_id, self.sink, time.time_ns())

    def end(self, end_ns: int | None = None) -> None:
        """It ends now, or ended at `end_ns`."""
        if self.sink is None:
            return
        # Clocks of two machines may differ by more than what lay between.
        until_ns = max(time.time_ns() if end_ns is None else end_ns, self.start_ns)
        attributes, failure = self.attributes, self.failure
        self.sink(
            Recorded(self.name, self.context, self.parent_id, self.start_ns, until_ns, attributes, self.links, failure)
        )

    def __enter__(self) -> Self:
        self._before = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            _current.reset(self._before)
        if kind is not None and not self.failure:
            self.fail(kind.__name__)
        self.end()


_current: ContextVar[Span | None] = ContextVar("current span", default=None)


def child(name: str) -> Span:
    """A span below the one that this is called in; one that nobody records outside of any."""
    current = _current.get()
    return current.child(name) if current is not None else Span(name, SpanContext(""), "", None, 0)


def carried() -> tuple[tuple[str, str], ...]:
    """Metadata of a call that tells the service called where its spans hang; none where nothing is recorded."""
    current = _current.get()
    return ((TRACEPARENT, current.traceparent),) if current is not None and current.recording else ()


class Tracer(ABC):
    """Records the spans of one service; every method but `close` may be called from any thread."""

    def __init__(self, share: float) -> None:
        """`share` of the trajectories is sampled."""
        self._share = share

    def samples(self, context: SpanContext) -> bool:
        """Whether spans in this trace are recorded."""
        return sampled(context.trace_id, self._share)

    def fields(self, context: SpanContext) -> dict[str, str]:
        """What an entry of a stream carries so that its readers hang their spans there."""
        if not context.span_id or not self.samples(context):
            return {}
        return {TRACEPARENT: f"00-{context.trace_id}-{context.span_id}-01"}

    def span(
        self,
        name: str,
        below: SpanContext,
        *,
        start_ns: int | None = None,
        links: Iterable[SpanContext] = (),
        span_id: str | None = None,
        always: bool = False,
    ) -> Span:
        """A span in this trace that began now or at `start_ns`; KeyError for a name that is not in SPANS.

        `always`: recorded whatever its trace id says, unless nothing is sampled.
        """
        SPANS[name]
        recording = self.samples(below) or (always and self._share > 0)
        return Span(
            name,
            SpanContext(below.trace_id, span_id or secrets.token_hex(8)),
            below.span_id,
            self.record if recording else None,
            time.time_ns() if start_ns is None else start_ns,
            tuple(links),
        )

    @abstractmethod
    def record(self, span: Recorded) -> None:
        """Hand on a span that has ended; neither waits nor raises."""

    @abstractmethod
    async def close(self) -> None:
        """Hand on what is left, within a deadline; what is recorded later is dropped."""


class Off(Tracer):
    """Records nothing."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def record(self, span: Recorded) -> None:
        """Nothing is sampled, so nothing comes."""

    async def close(self) -> None:
        """There is nothing to hand on."""


OFF = Off()


def _as_name(value: Value) -> Value:
    return _NOT_OF_A_NAME.sub("_", value[:_MOST_CHARACTERS]) if isinstance(value, str) else value
