"""Threads for a user's code, which may be slow or hang: an environment's answer, a reward component.

A thread cannot be killed. One that hangs keeps its slot until it returns, so hanging code stops the pool instead of
growing it; and the threads are daemons, so it never keeps the process from ending, as asyncio's own pool would.
A thread that is done waits for the next call: to start one holds up the event loop until the new thread has run.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class CrashedError(Exception):
    """The call ended its thread with something that is no usable Exception, for example SystemExit."""


def _nothing() -> None:
    pass


class DaemonThreads:
    """At most `size` calls at a time."""

    def __init__(self, size: int, *, name: str, on_late_end: Callable[[], None] = _nothing) -> None:
        """`name` names the threads; `on_late_end` is called when a call ends whose wait was cancelled."""
        self._slots = asyncio.Semaphore(size)
        self._name = name
        self._on_late_end = on_late_end
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = 0
        weakref.finalize(self, _end, self._calls, size).atexit = False

    async def start(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Wait for a free slot, begin the call, and return what will hold its result or exception.

        Cancelling the future leaves the call running in its slot.
        """
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def finish(set_it: Callable[[], None]) -> None:
            self._slots.release()
            self._idle += 1
            if done.cancelled():
                self._on_late_end()
            else:
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

        if self._idle:
            self._idle -= 1
        else:
            try:
                threading.Thread(target=_serve, args=(self._calls,), name=self._name, daemon=True).start()
            except RuntimeError:  # the machine gives no more threads: the place is not lost with this call
                self._slots.release()
                raise
        self._calls.put(work)
        return done

    async def run(self, call: Callable[[], T]) -> T:
        """The call's result or exception; cancelling the wait leaves the call running in its slot."""
        return await (await self.start(call))


def _serve(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # what it holds may go while this thread waits


def _end(calls: SimpleQueue[Callable[[], None] | None], size: int) -> None:
    for _ in range(size):
        calls.put(None)


def _settable(error: BaseException) -> Exception:
    # StopIteration cannot be set on a future, and SystemExit or CancelledError would act on the service itself.
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    crashed = CrashedError(f"{type(error).__name__}: {error}")
    crashed.__cause__ = error
    return crashed
