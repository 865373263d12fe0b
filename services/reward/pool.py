"""Threads for scorers: bounded in number, each call with a deadline; overdue ones show in metrics and health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from sao.threads import DaemonThreads
from services.reward import metrics

T = TypeVar("T")


class DeadlinePassedError(Exception):
    """The call is still running after its deadline."""


class ThreadPool(Generic[T]):
    """At most `size` calls at a time; `name` labels them in metrics."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._overdue = metrics.OVERDUE.labels(name)
        self._threads = DaemonThreads(size, name=f"scorer-{name}", on_late_end=self._overdue.dec)

    async def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """The call's result or its exception; DeadlinePassedError `timeout_s` after it began to run.

        The wait for a free slot is not counted: it is the pool's fault, not the call's.
        """
        done = await self._threads.start(call)
        try:
            await asyncio.wait({done}, timeout=timeout_s)
            if done.done():
                return done.result()
            msg = f"{self._name} is still running after {timeout_s:g} s"
            raise DeadlinePassedError(msg)
        finally:
            if done.cancel():
                self._overdue.inc()
