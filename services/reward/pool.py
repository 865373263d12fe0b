"""Threads for code that may be slow or hang: bounded in number, each call with a deadline.

A thread cannot be killed. One that misses its deadline keeps its slot until it returns, so hanging code fills
the pool and stops it (which health then shows) instead of growing it; and the threads are daemons, so hanging
code never keeps the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from services.reward import metrics

T = TypeVar("T")


class DeadlinePassedError(Exception):
    """The call is still running after its deadline."""


class ScorerCrashedError(Exception):
    """The call ended its thread with something that is no Exception, for example SystemExit."""


class ThreadPool(Generic[T]):
    """At most `size` calls at a time; `name` labels them in metrics."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._slots = asyncio.Semaphore(size)

    async def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """The call's result or its exception; DeadlinePassedError `timeout_s` after it began to run.

        The wait for a free slot is not counted: it is the pool's fault, not the call's.
        """
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def finish(set_it: Callable[[], None]) -> None:
            self._slots.release()
            if done.cancelled():
                metrics.OVERDUE.labels(self._name).dec()
            else:
                set_it()

        def report(set_it: Callable[[], None]) -> None:
            # The loop may be closed by now: then nobody waits for the result.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finish, set_it)

        def work() -> None:
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - the thread's edge: every end is reported
                report(partial(done.set_exception, _settable(error)))
            else:
                report(partial(done.set_result, result))

        threading.Thread(target=work, name=f"scorer-{self._name}", daemon=True).start()
        try:
            await asyncio.wait({done}, timeout=timeout_s)
            if done.done():
                return done.result()
            msg = f"{self._name} is still running after {timeout_s:g} s"
            raise DeadlinePassedError(msg)
        finally:
            if done.cancel():
                metrics.OVERDUE.labels(self._name).inc()


def _settable(error: BaseException) -> Exception:
    # StopIteration cannot be set on a future, and SystemExit or CancelledError would act on the service itself.
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    crashed = ScorerCrashedError(f"{type(error).__name__}: {error}")
    crashed.__cause__ = error
    return crashed
