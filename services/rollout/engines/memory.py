"""The in-memory twin: a policy that is a function, sampled with its exact log-probs."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sao.routing import RoutingShape
from services.rollout.engines.base import (
    EngineAbortedError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    Finish,
    Span,
    Turn,
    check_prompt,
    check_routes,
    check_salt,
    check_turn,
)

Policy = Callable[[Sequence[int]], Mapping[int, float]]
"""Token ids so far to the probability of each next id that has any."""


def uniform(vocab_size: int) -> Policy:
    """Every token is as likely as any other."""
    distribution = dict.fromkeys(range(vocab_size), 1.0 / vocab_size)
    return lambda _: distribution


class MemoryEngine:
    """Samples from `policy`; a test can hold it between tokens, change its version and make its next turns fail."""

    def __init__(
        self,
        engine_id: str,
        vocab_size: int,
        *,
        policy: Policy | None = None,
        version: str = "v00000000",
        seed: int = 0,
        routing: RoutingShape | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.version = version
        self.failures: list[EngineError] = []
        """Raised by the next turns, one each."""
        self.running: set[str] = set()
        self.prompts: list[list[int]] = []
        """Every prompt taken, in order."""
        self.salts: list[str] = []
        """And the cache salt of each."""
        self.rids: list[str] = []
        self._vocab_size = vocab_size
        self._policy = policy or uniform(vocab_size)
        self._routing = routing
        self._random = random.Random(seed)  # noqa: S311 - sampling, not a secret
        self._open = asyncio.Event()
        self._open.set()
        self._aborted: set[str] = set()
        self._cached: set[tuple[str, tuple[int, ...]]] = set()

    def pause(self) -> None:
        """No further token is sampled until `resume`."""
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    def abort(self, rid: str) -> None:
        """End this turn at its next token."""
        self._aborted.add(rid)

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
        check_prompt(self.engine_id, input_ids, self._vocab_size)
        if rid in self.running:
            raise EngineRefusedError(self.engine_id, f"turn {rid}: Duplicate request ID detected")
        if self.failures:
            raise self.failures.pop(0)
        self.prompts.append(list(input_ids))
        self.salts.append(cache_salt)
        self.rids.append(rid)
        self.running.add(rid)
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                turn = await self._sample(input_ids, max_new_tokens, frozenset(stop_token_ids), rid, started)
        except TimeoutError:
            raise EngineTimeoutError(self.engine_id, f"turn {rid}: no answer within {timeout_s:g} s") from None
        finally:
            self.running.discard(rid)
        check_turn(self.engine_id, turn, max_new_tokens=max_new_tokens, vocab_size=self._vocab_size)
        prefix = cache_salt, tuple(input_ids)
        check_salt(self.engine_id, turn, cache_salt, read_cache=prefix in self._cached)
        self._cached.add(prefix)
        if self._routing is None:
            return turn
        routes = self._routes([*input_ids, *turn.token_ids[:-1]], self._routing)
        turn = replace(turn, routed_experts=routes[routes_from * self._routing.row_bytes :])
        return check_routes(self.engine_id, turn, routes_from, len(input_ids), self._routing)

    async def close(self) -> None:
        return

    def _routes(self, tokens: Sequence[int], shape: RoutingShape) -> bytes:
        """Of every token under the present version: a retracted turn is computed again as a whole."""
        draws = (random.Random(f"{self.version}/{place}/{token}") for place, token in enumerate(tokens))  # noqa: S311
        layers = (draw.sample(range(shape.experts), shape.per_token) for draw in draws for _ in range(shape.layers))
        return bytes(itertools.chain.from_iterable(layers))

    async def _sample(
        self, prompt: Sequence[int], max_new_tokens: int, stops: frozenset[int], rid: str, started: float
    ) -> Turn:
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[Span] = []
        finish = Finish.LENGTH
        while len(ids) < max_new_tokens and finish is not Finish.STOP:
            await asyncio.sleep(0)
            await self._open.wait()
            if rid in self._aborted:
                raise EngineAbortedError(self.engine_id, f"turn {rid}: aborted after {len(ids)} tokens")
            distribution = self._policy([*prompt, *ids])
            token = self._random.choices(list(distribution), list(distribution.values()))[0]
            if spans and spans[-1].version == self.version:
                spans[-1] = Span(self.version, spans[-1].start, len(ids) + 1)
            else:
                spans.append(Span(self.version, len(ids), len(ids) + 1))
            ids.append(token)
            logprobs.append(math.log(distribution[token]))
            if token in stops:
                finish = Finish.STOP
        return Turn(ids, logprobs, spans, finish, time.monotonic() - started)
