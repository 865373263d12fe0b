"""Erase text that is over its time: at a service's start, and then again and again.

Each class of text has one owner, the service that owns its place (docs/privacy.md has the table). A pass may be killed
anywhere and repeated at will: what is erased is not found again. What cannot be erased now is counted and tried again
at the next pass; nothing here ends or stops the service, whose work goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from prometheus_client import Counter, Gauge

from sao.config.schema import Hours
from sao.endings import end
from sao.telemetry.logs import get_logger
from sao.threads import DaemonThreads

log = get_logger(__name__)

HOUR_S = 3600.0
LONGEST_PAUSE_S = HOUR_S
SHORTEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Pass:
    """What one look at one place came to."""

    erased: int = 0
    problem: str = ""
    """Why text that is over its time may be left there, and what to do; empty: none is."""


def with_rest(problems: Sequence[str]) -> str:
    """The first of several problems, and how many there are beside; empty where there are none."""
    return "; ".join(problems[:1]) + (f" (and {len(problems) - 1} more)" if problems[1:] else "")


Erase = Callable[[int], Awaitable[Pass]]
"""Erases what is older than this Unix time in milliseconds."""


@dataclass(frozen=True, slots=True)
class Duty:
    """One class of text that a service removes."""

    name: str
    """Of its setting, without the unit."""
    keep_h: Hours
    erase: Erase


@dataclass(frozen=True, slots=True)
class RetentionMetrics:
    """A service's own; each with the label `class`."""

    erased: Counter
    failed: Counter
    passed: Gauge
    """Unix time of the last pass that left nothing over."""


def pause_s(keep_h: float) -> float:
    """Seconds between two passes: a tenth of the time that text is kept, an hour at most."""
    return min(max(keep_h * HOUR_S / 10, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)


def in_thread(erase: Callable[[int], Pass]) -> Erase:
    """An `Erase` that blocks, off the event loop, one pass at a time."""
    threads = DaemonThreads(1, name="retention")
    return lambda before_ms: threads.run(partial(erase, before_ms))


class Retention:
    """The duties of one service; those without a time are left out."""

    def __init__(
        self, duties: Sequence[Duty], metrics: RetentionMetrics, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._duties = [(duty, duty.keep_h) for duty in duties if duty.keep_h != "forever"]
        self._metrics = metrics
        self._wall_clock = wall_clock
        for duty, _ in self._duties:
            metrics.erased.labels(duty.name)
            metrics.failed.labels(duty.name)

    async def once(self) -> None:
        """One pass of each."""
        for duty, keep_h in self._duties:
            await self._pass(duty, keep_h)

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Passes now and again for as long as the body lasts."""
        tasks = [asyncio.ensure_future(self._keep(duty, keep_h)) for duty, keep_h in self._duties]
        try:
            yield
        finally:
            await end(tasks)

    async def _keep(self, duty: Duty, keep_h: float) -> None:
        while True:
            await self._pass(duty, keep_h)
            await asyncio.sleep(pause_s(keep_h))

    async def _pass(self, duty: Duty, keep_h: float) -> None:
        before_ms = int((self._wall_clock() - keep_h * HOUR_S) * 1000)
        try:
            done = await duty.erase(before_ms)
        except Exception as error:  # whatever goes wrong here must not end what the service is for
            log.exception("text that is over its time could not be erased", text=duty.name)
            done = Pass(problem=f"{type(error).__name__}")
        else:
            if done.problem:
                log.warning("text that is over its time may be left", text=duty.name, problem=done.problem)
        self._metrics.erased.labels(duty.name).inc(done.erased)
        if done.erased:
            log.info("erased what is over its time", text=duty.name, erased=done.erased, keep_h=keep_h)
        if done.problem:
            self._metrics.failed.labels(duty.name).inc()
        else:
            self._metrics.passed.labels(duty.name).set(self._wall_clock())
