"""Generated trajectories, good ones and ones that violate exactly one named invariant."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from uuid import uuid4

from sao.ids import uuid7
from sao.invariants import Code, Limits
from sao.routing import NO_RECORD, RoutingShape
from sao.v1 import trajectory_pb2 as pb

VERSIONS = ("v00000001", "v00000002", "v00000003")
LIMITS = Limits(run="run", vocab_size=32, max_tokens=512, max_bytes=2**20, logprob_tolerance=1e-5)

ROUTING = RoutingShape(layers=2, experts=4, per_token=2)

_A, _O = pb.SEGMENT_KIND_ACTION, pb.SEGMENT_KIND_OBSERVATION


def action(rng: random.Random, limits: Limits) -> pb.Segment:
    """A sampled turn under one to three versions."""
    count = rng.randint(1, 12)
    cuts = sorted(rng.sample(range(1, count), min(rng.randint(0, 2), count - 1)))
    edges = [0, *cuts, count]
    return pb.Segment(
        kind=_A,
        token_ids=[rng.randrange(limits.vocab_size) for _ in range(count)],
        logprobs=[rng.choice([0.0, limits.logprob_tolerance / 2, -rng.expovariate(1.0)]) for _ in range(count)],
        versions=[
            pb.VersionSpan(version=rng.choice(VERSIONS), start=start, end=end)
            for start, end in itertools.pairwise(edges)
        ],
    )


def observation(rng: random.Random, limits: Limits) -> pb.Segment:
    """What an environment appended."""
    return pb.Segment(kind=_O, token_ids=[rng.randrange(limits.vocab_size) for _ in range(rng.randint(1, 8))])


def good(rng: random.Random, limits: Limits = LIMITS, *, ordinal: int | None = None) -> pb.Trajectory:
    """A trajectory that violates nothing: two to five turns, observations between them and perhaps after them."""
    turns = rng.randint(2, 5)
    segments = [make(rng, limits) for _ in range(turns) for make in (action, observation)]
    if rng.random() < 0.5:
        segments.pop()
    return pb.Trajectory(
        id=uuid7(),
        run=limits.run,
        task="count",
        prompt_id="p0",
        ordinal=rng.randrange(10**6) if ordinal is None else ordinal,
        attempt=rng.randint(1, 3),
        prompt_token_ids=[rng.randrange(limits.vocab_size) for _ in range(rng.randint(1, 20))],
        segments=segments,
        sampling=pb.SamplingConfig(temperature=1, top_p=1, top_k=-1, repetition_penalty=1),
        finish_reason=rng.choice(pb.FinishReason.values()[1:]),
        engine_id="engine-0",
        worker_id="worker-0",
        turns=[pb.TurnTiming(started_s=1.0, engine_s=0.1) for _ in range(turns)],
        task_payload_json='{"answer": 4}',
        lease_id="0-1",
    )


def routed_experts(rng: random.Random, message: pb.Trajectory, routing: RoutingShape) -> bytes:
    """A record as an engine would have given it, with the rows of a last observation missing."""
    lengths = [len(message.prompt_token_ids), *(len(segment.token_ids) for segment in message.segments)]
    missing = lengths[-1] if message.segments[-1].kind == _O else 0
    layers = (sum(lengths) - 1 - missing) * routing.layers
    recorded = [rng.sample(range(routing.experts), routing.per_token) for _ in range(layers)]
    return bytes(itertools.chain.from_iterable(recorded)) + bytes([NO_RECORD]) * (missing * routing.row_bytes)


Mutation = Callable[[pb.Trajectory, random.Random, Limits], None]
MUTATIONS: dict[str, tuple[Code, Mutation]] = {}
"""By name: the invariant that breaks, and how. Each leaves every other invariant whole."""


def _breaks(code: Code) -> Callable[[Mutation], Mutation]:
    def register(mutation: Mutation) -> Mutation:
        MUTATIONS[mutation.__name__.strip("_")] = (code, mutation)
        return mutation

    return register


def _segment(message: pb.Trajectory, rng: random.Random, kind: pb.SegmentKind.ValueType) -> pb.Segment:
    return rng.choice([segment for segment in message.segments if segment.kind == kind])


@_breaks(Code.ID)
def _id_of_another_kind(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    message.id = rng.choice(["", "seven", str(uuid4()), uuid7().replace("-", ""), "X" * 200])


@_breaks(Code.RUN)
def _another_run(message: pb.Trajectory, rng: random.Random, limits: Limits) -> None:
    message.run = rng.choice(["", limits.run + "x"])


@_breaks(Code.TASK)
def _no_task(message: pb.Trajectory, _rng: random.Random, _: Limits) -> None:
    message.task = ""


@_breaks(Code.ORDINAL)
def _negative_ordinal(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    message.ordinal = -rng.randint(1, 10**9)


@_breaks(Code.SAMPLE)
def _sample_outside(message: pb.Trajectory, rng: random.Random, limits: Limits) -> None:
    message.sample = rng.choice([-1, limits.samples, 10**6])


@_breaks(Code.ATTEMPT)
def _no_attempt(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    message.attempt = rng.choice([0, -1])


@_breaks(Code.PROMPT_EMPTY)
def _no_prompt(message: pb.Trajectory, _rng: random.Random, _: Limits) -> None:
    del message.prompt_token_ids[:]


@_breaks(Code.SEGMENT_KIND)
def _unknown_kind(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    _segment(message, rng, _O).kind = pb.SEGMENT_KIND_UNSPECIFIED


@_breaks(Code.SEGMENT_ORDER)
def _observation_twice(message: pb.Trajectory, rng: random.Random, limits: Limits) -> None:
    at = rng.choice([0, 2])  # as the first segment, or after another observation
    message.segments.insert(at, observation(rng, limits))


@_breaks(Code.SEGMENT_EMPTY)
def _empty_observation(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    del _segment(message, rng, _O).token_ids[:]


@_breaks(Code.SEGMENT_EMPTY)
def _empty_action(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    segment = _segment(message, rng, _A)
    segment.CopyFrom(pb.Segment(kind=_A))


@_breaks(Code.NO_ACTION)
def _nothing_sampled(message: pb.Trajectory, _rng: random.Random, _: Limits) -> None:
    del message.segments[:]
    del message.turns[:]


@_breaks(Code.LOGPROB_LENGTH)
def _unequal_lengths(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    segment = _segment(message, rng, _A)
    if rng.random() < 0.5:
        segment.logprobs.append(-1.0)
    else:
        segment.logprobs.pop()


@_breaks(Code.LOGPROB_NOT_FINITE)
def _not_finite(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    segment = _segment(message, rng, _A)
    segment.logprobs[rng.randrange(len(segment.logprobs))] = rng.choice([float("nan"), float("inf"), float("-inf")])


@_breaks(Code.LOGPROB_POSITIVE)
def _positive_logprob(message: pb.Trajectory, rng: random.Random, limits: Limits) -> None:
    segment = _segment(message, rng, _A)
    segment.logprobs[rng.randrange(len(segment.logprobs))] = rng.choice([2 * limits.logprob_tolerance, 0.5, 1e30])


@_breaks(Code.OBSERVATION_LOGPROBS)
def _logprobs_on_observation(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    segment = _segment(message, rng, _O)
    segment.logprobs.extend([0.0] * len(segment.token_ids))


@_breaks(Code.OBSERVATION_VERSIONS)
def _versions_on_observation(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    segment = _segment(message, rng, _O)
    segment.versions.add(version=VERSIONS[0], start=0, end=len(segment.token_ids))


@_breaks(Code.TOKEN_RANGE)
def _id_outside_vocabulary(message: pb.Trajectory, rng: random.Random, limits: Limits) -> None:
    ids = rng.choice([message.prompt_token_ids, *(segment.token_ids for segment in message.segments)])
    ids[rng.randrange(len(ids))] = rng.choice([limits.vocab_size, 2**32 - 1])


@_breaks(Code.SPAN_COVERAGE)
def _spans_with_holes(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    spans = _segment(message, rng, _A).versions
    span = rng.choice(spans)
    how = rng.randrange(5)
    if how == 0:
        span.start += 1
    elif how == 1:
        span.end += 1
    elif how == 2:
        span.end -= 1
    elif how == 3:
        del spans[:]
    else:
        spans.add(version=VERSIONS[0], start=spans[-1].end, end=spans[-1].end)


@_breaks(Code.VERSION_UNKNOWN)
def _version_nobody_announced(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    rng.choice(_segment(message, rng, _A).versions).version = rng.choice(["", "v99999999", "default"])


@_breaks(Code.FINISH_REASON)
def _no_finish_reason(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    message.finish_reason = rng.choice([pb.FINISH_REASON_UNSPECIFIED, 99])  # type: ignore[assignment]


@_breaks(Code.SAMPLING)
def _another_distribution(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    settings: list[tuple[str, list[float]]] = [
        ("temperature", [0.0, 0.7, float("nan")]),
        ("top_p", [0.0, 0.95]),
        ("top_k", [0, 50]),
        ("min_p", [0.05]),
        ("repetition_penalty", [0.0, 1.1]),
        ("frequency_penalty", [0.5]),
        ("presence_penalty", [-0.5]),
    ]
    name, values = rng.choice(settings)
    setattr(message.sampling, name, rng.choice(values))


@_breaks(Code.SAMPLING)
def _no_sampling(message: pb.Trajectory, _rng: random.Random, _: Limits) -> None:
    message.ClearField("sampling")


@_breaks(Code.TURN_COUNT)
def _turn_timings_missing(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    if rng.random() < 0.5:
        message.turns.add()
    else:
        message.turns.pop()


@_breaks(Code.PAYLOAD)
def _payload_is_no_object(message: pb.Trajectory, rng: random.Random, _: Limits) -> None:
    message.task_payload_json = rng.choice(["", "[]", "null", "4", '"x"', "{", "[" * 100_000])


@_breaks(Code.TOO_MANY_TOKENS)
def _too_long(message: pb.Trajectory, _rng: random.Random, limits: Limits) -> None:
    message.prompt_token_ids.extend([0] * limits.max_tokens)


@_breaks(Code.TOO_LARGE)
def _too_large(message: pb.Trajectory, _rng: random.Random, limits: Limits) -> None:
    message.task_payload_json = '{"x": "' + "x" * limits.max_bytes + '"}'


def bad(name: str, rng: random.Random, limits: Limits = LIMITS) -> tuple[pb.Trajectory, Code]:
    """A good trajectory after the mutation of this name, and the invariant it violates now."""
    message = good(rng, limits)
    code, mutate = MUTATIONS[name]
    mutate(message, rng, limits)
    return message, code
