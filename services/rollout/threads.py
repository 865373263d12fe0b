"""Threads for a task's own code, which may hang.

A thread cannot be killed. asyncio's own pool would be waited for at the end, so one hanging environment would keep the
worker from ending; these are daemons. One that hangs keeps its slot, so hanging code stops the pool, never grows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class DaemonThreads:
    """At most `size` calls at a time."""

    def __init__(self, size: int) -> None:
        self._slots = asyncio.Semaphore(size)

    async def run(self, call: Callable[[], T]) -> T:
        """The call's result or exception; cancelling the wait leaves the call running in its slot."""
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def finish(set_it: Callable[[], None]) -> None:
            self._slots.release()
            if not done.cancelled():
                set_it()

        def report(set_it: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(finish, set_it)

        def work() -> None:
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - the thread's edge: every end is reported
                report(partial(done.set_exception, _settable(error)))
            else:
                report(partial(done.set_result, result))

        threading.Thread(target=work, name="environment", daemon=True).start()
        return await done


def _settable(error: BaseException) -> Exception:
    """StopIteration can't be set on a future; SystemExit and the like would act on the worker itself."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
