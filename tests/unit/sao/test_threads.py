"""Threads for a user's code are few, are used again, and go with what they belong to."""

from __future__ import annotations

import asyncio
import gc
import threading

from sao.threads import DaemonThreads
from tests.support.scored_tasks import until


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


async def test_calls_one_after_the_other_take_one_thread_and_more_at_once_take_more() -> None:
    threads = DaemonThreads(3, name="again")
    seen = {await threads.run(threading.get_ident) for _ in range(20)}
    assert len(seen) == 1
    together = threading.Barrier(3)
    await asyncio.gather(*(threads.run(lambda: together.wait(10)) for _ in range(3)))
    assert len(named("again")) == 3


async def test_a_thread_whose_call_was_given_up_is_used_again_when_it_returns() -> None:
    threads, release = DaemonThreads(1, name="late"), threading.Event()
    given_up = await threads.start(lambda: release.wait(10))
    given_up.cancel()
    release.set()
    assert await threads.run(lambda: 7) == 7
    assert len(named("late")) == 1


async def test_idle_threads_end_when_nothing_can_call_them_any_more() -> None:
    threads = DaemonThreads(2, name="gone")
    together = threading.Barrier(2)
    await asyncio.gather(*(threads.run(lambda: together.wait(10)) for _ in range(2)))
    del threads
    gc.collect()
    await until(lambda: not named("gone"), "the threads to end")
