"""What makes a `sao.v1.Trajectory` acceptable, checked once at ingress; behind it nobody checks again.

Each invariant has a code of its own (stable: clients, dashboards and dead letters name it) and an error text
that says what was found and what was expected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

from sao.ids import uuid7_unix_ms
from sao.routing import RoutingShape
from sao.v1 import trajectory_pb2 as pb

_KINDS = (pb.SEGMENT_KIND_ACTION, pb.SEGMENT_KIND_OBSERVATION)
_FINISH_REASONS = frozenset(pb.FinishReason.values()) - {pb.FINISH_REASON_UNSPECIFIED}
_TRAINABLE = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


class Code(Enum):
    """Which invariant is violated."""

    ID = "id"
    RUN = "run"
    TASK = "task"
    ORDINAL = "ordinal"
    SAMPLE = "sample"
    ATTEMPT = "attempt"
    PROMPT_EMPTY = "prompt_empty"
    SEGMENT_KIND = "segment_kind"
    SEGMENT_ORDER = "segment_order"
    SEGMENT_EMPTY = "segment_empty"
    NO_ACTION = "no_action"
    LOGPROB_LENGTH = "logprob_length"
    LOGPROB_NOT_FINITE = "logprob_not_finite"
    LOGPROB_POSITIVE = "logprob_positive"
    OBSERVATION_LOGPROBS = "observation_logprobs"
    OBSERVATION_VERSIONS = "observation_versions"
    TOKEN_RANGE = "token_range"  # noqa: S105
    SPAN_COVERAGE = "span_coverage"
    VERSION_UNKNOWN = "version_unknown"
    FINISH_REASON = "finish_reason"
    SAMPLING = "sampling"
    TURN_COUNT = "turn_count"
    PAYLOAD = "payload"
    TOO_MANY_TOKENS = "too_many_tokens"
    TOO_LARGE = "too_large"
    ROUTED_EXPERTS = "routed_experts"


@dataclass(frozen=True, slots=True)
class Violation:
    code: Code
    text: str

    def __str__(self) -> str:
        return f"{self.code.value}: {self.text}"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the run accepts."""

    run: str
    vocab_size: int
    """Rows of the model's embedding: ids are below this."""
    max_tokens: int
    """Prompt, actions and observations together."""
    max_bytes: int
    """Serialised size, with the record of routed experts."""
    logprob_tolerance: float
    """A log-prob may exceed 0 by this much (rounding in the engine)."""
    samples: int = 1
    """Rollouts the run wants of one ordinal."""
    routing: RoutingShape | None = None
    """Of the record of routed experts that each trajectory needs; None: none may have one."""


def violations(message: pb.Trajectory, limits: Limits, known_versions: Collection[str]) -> list[Violation]:
    """Every violated invariant, in the order of the message; none for a good trajectory."""
    return [
        *_identity(message, limits),
        *_structure(message),
        *_token_ranges(message, limits),
        *_logprobs(message, limits),
        *_versions(message, known_versions),
        *_conclusion(message),
        *_sizes(message, limits),
    ]


def routing_violations(message: pb.Trajectory, routed_experts: bytes, limits: Limits) -> list[Violation]:
    """What is wrong with the record of routed experts that comes with a trajectory."""
    if limits.routing is None:
        if not routed_experts:
            return []
        text = f"{len(routed_experts)} bytes of routed experts, expected none: trainer.routing_replay is off"
        return [Violation(Code.ROUTED_EXPERTS, text)]
    problem = limits.routing.problem(routed_experts, _tokens(message) - 1)
    if problem:
        return [Violation(Code.ROUTED_EXPERTS, problem)]
    size = message.ByteSize() + len(routed_experts)
    if size > limits.max_bytes:
        text = f"{size} bytes with its routed experts, expected at most {limits.max_bytes}"
        return [Violation(Code.TOO_LARGE, text)]
    return []


def unknown_versions(message: pb.Trajectory, known_versions: Collection[str]) -> list[str]:
    """The version names in its action spans that are not among `known_versions`, sorted."""
    named = {span.version for segment in _actions(message) for span in segment.versions}
    return sorted(named - set(known_versions))


def _actions(message: pb.Trajectory) -> Iterator[pb.Segment]:
    return (segment for segment in message.segments if segment.kind == pb.SEGMENT_KIND_ACTION)


def _tokens(message: pb.Trajectory) -> int:
    return len(message.prompt_token_ids) + sum(len(segment.token_ids) for segment in message.segments)


def _identity(message: pb.Trajectory, limits: Limits) -> Iterator[Violation]:
    try:
        uuid7_unix_ms(message.id)
    except ValueError:
        yield Violation(Code.ID, f"id is {message.id[:64]!r}, expected a lower-case UUIDv7")
    if message.run != limits.run:
        yield Violation(Code.RUN, f"run is {message.run[:64]!r}, expected {limits.run!r}")
    if not message.task:
        yield Violation(Code.TASK, "task is empty, expected the task's name")
    if message.ordinal < 0:
        yield Violation(Code.ORDINAL, f"ordinal is {message.ordinal}, expected at least 0")
    if not 0 <= message.sample < limits.samples:
        yield Violation(Code.SAMPLE, f"sample is {message.sample}, expected 0 to {limits.samples - 1}")
    if message.attempt < 1:
        yield Violation(Code.ATTEMPT, f"attempt is {message.attempt}, expected at least 1")


def _structure(message: pb.Trajectory) -> Iterator[Violation]:
    """prompt, ACTION, OBSERVATION, ACTION, ...: every part non-empty, ending in either kind."""
    if not message.prompt_token_ids:
        yield Violation(Code.PROMPT_EMPTY, "prompt_token_ids is empty, expected at least one token")
    previous = pb.SEGMENT_KIND_OBSERVATION
    for index, segment in enumerate(message.segments):
        if segment.kind not in _KINDS:
            yield Violation(
                Code.SEGMENT_KIND, f"segment {index} has kind {segment.kind}, expected ACTION or OBSERVATION"
            )
        elif segment.kind == previous:
            name = pb.SegmentKind.Name(segment.kind).removeprefix("SEGMENT_KIND_")
            where = "follows one of its kind" if index else "is the first"
            yield Violation(
                Code.SEGMENT_ORDER, f"segment {index} ({name}) {where}, expected ACTION first, then alternation"
            )
        previous = segment.kind
        if not segment.token_ids:
            yield Violation(Code.SEGMENT_EMPTY, f"segment {index} has no tokens, expected at least one")
    if not any(_actions(message)):
        yield Violation(Code.NO_ACTION, "no ACTION segment, expected at least one sampled token")


def _token_ranges(message: pb.Trajectory, limits: Limits) -> Iterator[Violation]:
    parts = [("prompt_token_ids", message.prompt_token_ids)]
    parts += [(f"segment {index}", segment.token_ids) for index, segment in enumerate(message.segments)]
    for name, ids in parts:
        top = max(ids, default=0)
        if top >= limits.vocab_size:
            yield Violation(Code.TOKEN_RANGE, f"{name} holds id {top}, expected ids below {limits.vocab_size}")


def _logprobs(message: pb.Trajectory, limits: Limits) -> Iterator[Violation]:
    for index, segment in enumerate(message.segments):
        if segment.kind == pb.SEGMENT_KIND_OBSERVATION and segment.logprobs:
            found = len(segment.logprobs)
            yield Violation(
                Code.OBSERVATION_LOGPROBS, f"segment {index} (OBSERVATION) has {found} log-probs, expected none"
            )
        if segment.kind != pb.SEGMENT_KIND_ACTION:
            continue
        if len(segment.logprobs) != len(segment.token_ids):
            yield Violation(
                Code.LOGPROB_LENGTH,
                f"segment {index} has {len(segment.logprobs)} log-probs, expected one for each of its "
                f"{len(segment.token_ids)} tokens",
            )
        broken = [position for position, value in enumerate(segment.logprobs) if not math.isfinite(value)]
        if broken:
            value = segment.logprobs[broken[0]]
            yield Violation(
                Code.LOGPROB_NOT_FINITE,
                f"segment {index} token {broken[0]} has log-prob {value}, expected a finite one",
            )
        top = max((value for value in segment.logprobs if math.isfinite(value)), default=0.0)
        if top > limits.logprob_tolerance:
            yield Violation(
                Code.LOGPROB_POSITIVE,
                f"segment {index} has log-prob {top:g}, expected at most 0 (tolerance {limits.logprob_tolerance:g})",
            )


def _versions(message: pb.Trajectory, known_versions: Collection[str]) -> Iterator[Violation]:
    for index, segment in enumerate(message.segments):
        if segment.kind == pb.SEGMENT_KIND_OBSERVATION and segment.versions:
            found = len(segment.versions)
            yield Violation(
                Code.OBSERVATION_VERSIONS, f"segment {index} (OBSERVATION) has {found} version spans, expected none"
            )
        if segment.kind != pb.SEGMENT_KIND_ACTION:
            continue
        reached = 0
        whole = True
        for span in segment.versions:
            whole = whole and span.start == reached < span.end
            reached = span.end
        if not whole or reached != len(segment.token_ids):
            spans = ", ".join(f"[{span.start}, {span.end})" for span in segment.versions[:8])
            yield Violation(
                Code.SPAN_COVERAGE,
                f"segment {index} has version spans {spans or 'none'}, expected contiguous half-open spans over "
                f"[0, {len(segment.token_ids)})",
            )
    unknown = unknown_versions(message, known_versions)
    if unknown:
        names = ", ".join(repr(name[:64]) for name in unknown[:8])
        yield Violation(
            Code.VERSION_UNKNOWN, f"version {names} is not on the board, expected one announced before it was served"
        )


def _conclusion(message: pb.Trajectory) -> Iterator[Violation]:
    if message.finish_reason not in _FINISH_REASONS:
        yield Violation(Code.FINISH_REASON, f"finish_reason is {message.finish_reason}, expected a known one, set")
    wrong = {
        name: getattr(message.sampling, name)
        for name, expected in _TRAINABLE.items()
        if getattr(message.sampling, name) != expected
    }
    if wrong:
        found = ", ".join(f"{name} {value:g}" for name, value in wrong.items())
        expected = ", ".join(f"{name} {_TRAINABLE[name]:g}" for name in wrong)
        yield Violation(
            Code.SAMPLING, f"sampling has {found}, expected {expected}: training needs the whole distribution"
        )
    actions = sum(1 for _ in _actions(message))
    if len(message.turns) != actions:
        yield Violation(
            Code.TURN_COUNT, f"{len(message.turns)} turn timings, expected {actions} (one an ACTION segment)"
        )
    try:
        payload = json.loads(message.task_payload_json)
    except (ValueError, RecursionError):
        yield Violation(
            Code.PAYLOAD, f"task_payload_json is {message.task_payload_json[:40]!r}, expected a JSON object"
        )
    else:
        if not isinstance(payload, dict):
            yield Violation(Code.PAYLOAD, f"task_payload_json holds a {type(payload).__name__}, expected a JSON object")


def _sizes(message: pb.Trajectory, limits: Limits) -> Iterator[Violation]:
    tokens = _tokens(message)
    if tokens > limits.max_tokens:
        yield Violation(Code.TOO_MANY_TOKENS, f"{tokens} tokens, expected at most {limits.max_tokens}")
    size = message.ByteSize()
    if size > limits.max_bytes:
        yield Violation(Code.TOO_LARGE, f"{size} bytes, expected at most {limits.max_bytes}")
