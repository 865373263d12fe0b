"""The twin for tests: computes what it is told, fails as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from services.reward.scorers.base import DeadlinePassedError, ScoringRequest, checked

Answer = Callable[[ScoringRequest], Awaitable[Mapping[str, float]]]


class MemoryScorer:
    """One coroutine function behind the contract of a scorer."""

    kind: str = "memory"

    def __init__(
        self,
        name: str,
        components: Mapping[str, str],
        answer: Answer,
        *,
        deadline_s: float = 5.0,
        concurrency: int = 16,
        judges: bool = False,
    ) -> None:
        self.name = name
        self.components = components
        self.deadline_s = deadline_s
        self.concurrency = concurrency
        self.judges = judges
        self.bounds: tuple[float, float] | None = None
        self._answer = answer
        self._slots = asyncio.Semaphore(concurrency)

    async def score(self, request: ScoringRequest) -> Mapping[str, float]:
        async with self._slots:
            limit = asyncio.timeout(self.deadline_s)
            try:
                async with limit:
                    return checked(await self._answer(request), self.components)
            except TimeoutError as error:
                if limit.expired():
                    raise DeadlinePassedError(self.name) from error
                raise

    async def close(self) -> None:
        """Nothing is open."""
