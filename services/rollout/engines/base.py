"""The engine boundary: token ids in; token ids, log-probs and weight versions out.

Invariants every implementation keeps, and tests/contract/test_engines.py checks on all of them:

- **Whole or an error.** A `Turn` has one finite log-prob per token and version spans that cover all of them;
  anything less is an EngineOutputError, never a Turn with holes.
- **A turn ends for a reason.** STOP: its last token, which belongs to it, is a stop token or the model's own
  end-of-sequence token. LENGTH: it has exactly `max_new_tokens` tokens.
- **Bad ids never leave.** A prompt with an id outside the vocabulary is refused before it is sent: one such id
  ends a real SGLang server (docs/engine.md).
- **Routes come with the turn** of an engine that was made with a `RoutingShape`: the experts that each token of prompt
  and answer but the last was sent to, also where the prompt's prefix was cached. Without one there are none.
- **No keys and values of other weights** than those of the version that `cache_salt` names, when one is given: a turn
  that read the cache under it and whose first token another version sampled is a StaleCacheError.
- **Every call ends** within `timeout_s`, by a Turn or by an EngineError.

Sampling is the whole distribution at temperature 1 (`SAMPLING`); nothing else is trainable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol

from sao.routing import NO_RECORD, RoutingShape
from sao.v1 import trajectory_pb2 as pb

SAMPLING = pb.SamplingConfig(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)


class Finish(Enum):
    """Why a turn ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a turn were sampled by this weight version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One finished action."""

    token_ids: list[int]
    logprobs: list[float]
    """Nats, under the distribution each token was sampled from."""
    spans: list[Span]
    finish: Finish
    engine_s: float
    """Wall time between request and answer, pauses included."""
    routed_experts: bytes = b""
    """uint8 [prompt + answer - 1 - routes_from, layers, experts per token], as the engine computed them last."""

    @property
    def versions(self) -> frozenset[str]:
        return frozenset(span.version for span in self.spans)


class EngineError(Exception):
    """A turn failed; `kind` names how, for the metrics."""

    kind: ClassVar[str] = "error"

    def __init__(self, engine_id: str, text: str) -> None:
        self.engine_id = engine_id
        super().__init__(f"{engine_id}: {text}")


class EngineUnavailableError(EngineError):
    """It does not answer, or answers that it can't now (connection lost, 5xx, queue full)."""

    kind = "unavailable"


class EngineTimeoutError(EngineError):
    """No answer within the turn's deadline."""

    kind = "timeout"


class EngineAbortedError(EngineError):
    """The engine gave the turn up on somebody's order; what it had sampled is not a turn."""

    kind = "aborted"


class EngineRefusedError(EngineError):
    """The request itself is at fault (4xx, or an id outside the vocabulary): repeating it is useless."""

    kind = "refused"


class EngineOutputError(EngineError):
    """The answer can't be trained on: null log-probs (weights hold NaN), missing versions or routes."""

    kind = "output"


class StaleCacheError(EngineError):
    """The turn was asked of one version and begun by another, with what the first had left in the prefix cache."""

    kind = "stale_cache"


class Engine(Protocol):
    """One server that samples turns."""

    engine_id: str

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        rid: str,
        timeout_s: float,
        routes_from: int = 0,
        cache_salt: str = "",
    ) -> Turn:
        """Sample one turn after `input_ids`. `rid`: 32 hexadecimal digits, never used before. Raises EngineError.

        `routes_from`: the first token whose route is wanted, where routes are; earlier ones are known already.
        `cache_salt`: the version that the engine serves, where a load does not empty its prefix cache.
        """

    async def close(self) -> None: ...


def check_prompt(engine_id: str, input_ids: Sequence[int], vocab_size: int) -> None:
    """EngineRefusedError unless the prompt is one that may be sent."""
    if not input_ids:
        raise EngineRefusedError(engine_id, "prompt is empty, expected at least one token id")
    low, high = min(input_ids), max(input_ids)
    if low < 0 or high >= vocab_size:
        found = low if low < 0 else high
        text = f"prompt holds id {found}, expected 0 <= id < {vocab_size}; not sent, it would end the server"
        raise EngineRefusedError(engine_id, text)


def check_salt(engine_id: str, turn: Turn, cache_salt: str, *, read_cache: bool) -> Turn:
    """The turn itself unless it began with keys and values of other weights; StaleCacheError otherwise.

    A request that a pause held is sampled by the next version, under the salt of the one before.
    """
    first = turn.spans[0].version
    if cache_salt and read_cache and first != cache_salt:
        raise StaleCacheError(engine_id, f"sampled by {first} from a prefix cached under {cache_salt}")
    return turn


def check_routes(engine_id: str, turn: Turn, first: int, prompt_tokens: int, routing: RoutingShape) -> Turn:
    """The turn itself when its routes, from token `first` on, are whole; EngineOutputError otherwise."""
    problem = routing.problem(turn.routed_experts, prompt_tokens + len(turn.token_ids) - 1 - first)
    if not problem and NO_RECORD in turn.routed_experts:
        problem = f"holds {NO_RECORD}, expected an expert for every token"
    if problem:
        raise EngineOutputError(engine_id, f"routed experts: {problem}")
    return turn


def check_turn(engine_id: str, turn: Turn, *, max_new_tokens: int, vocab_size: int) -> Turn:
    """The turn itself when it keeps the invariants above; EngineOutputError otherwise."""
    count = len(turn.token_ids)
    if not 1 <= count <= max_new_tokens:
        raise EngineOutputError(engine_id, f"{count} tokens, expected 1 to {max_new_tokens}")
    if min(turn.token_ids) < 0 or max(turn.token_ids) >= vocab_size:
        text = f"ids from {min(turn.token_ids)} to {max(turn.token_ids)}, expected 0 <= id < {vocab_size}"
        raise EngineOutputError(engine_id, text)
    if len(turn.logprobs) != count:
        raise EngineOutputError(engine_id, f"{len(turn.logprobs)} log-probs for {count} tokens")
    if not all(math.isfinite(value) for value in turn.logprobs):
        raise EngineOutputError(engine_id, "log-probs are not all finite: check the weights for NaN")
    reached = 0
    for span in turn.spans:
        if span.start != reached or span.end <= span.start or not span.version:
            raise EngineOutputError(engine_id, f"version span {span} after token {reached}, expected contiguous spans")
        reached = span.end
    if reached != count:
        raise EngineOutputError(engine_id, f"version spans cover {reached} of {count} tokens")
    return turn
