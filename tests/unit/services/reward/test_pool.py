from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from sao.threads import CrashedError
from services.reward import metrics
from services.reward.pool import DeadlinePassedError, ThreadPool
from tests.support.scored_tasks import until


def overdue(name: str) -> float:
    value: float = metrics.OVERDUE.labels(name)._value.get()
    return value


def raiser(error: BaseException) -> Callable[[], int]:
    def call() -> int:
        raise error

    return call


async def test_a_call_gives_its_result() -> None:
    assert await ThreadPool[int]("t", 1).run(lambda: 7, 5.0) == 7


@pytest.mark.parametrize("error", [ValueError("x"), TimeoutError("the judge's own")])
async def test_a_call_gives_its_own_exception(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        await ThreadPool[int]("t", 1).run(raiser(error), 5.0)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration(1)])
async def test_what_would_act_on_the_service_is_wrapped(error: BaseException) -> None:
    with pytest.raises(CrashedError, match=type(error).__name__):
        await ThreadPool[int]("t", 1).run(raiser(error), 5.0)


async def test_a_hanging_call_keeps_its_slot_until_it_returns() -> None:
    pool, release, ran = ThreadPool[bool]("hang", 1), threading.Event(), threading.Event()
    before = overdue("hang")
    with pytest.raises(DeadlinePassedError, match=r"hang is still running after 0\.01 s"):
        await pool.run(lambda: release.wait(20), 0.01)
    assert overdue("hang") == before + 1

    def second() -> bool:
        ran.set()
        return True

    waiting = asyncio.ensure_future(pool.run(second, 5.0))
    await asyncio.sleep(0)
    assert not ran.is_set()
    release.set()
    # The wait for the slot was longer than nothing, and is not held against the second call.
    assert await waiting
    assert overdue("hang") == before


async def test_no_more_calls_run_than_there_are_slots() -> None:
    pool, lock, release = ThreadPool[int]("bound", 3), threading.Lock(), threading.Event()
    running = most = 0

    def call() -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        release.wait(20)
        with lock:
            running -= 1
        return 1

    calls = [asyncio.ensure_future(pool.run(call, 20.0)) for _ in range(10)]
    await until(lambda: running == 3, "three calls to run")
    release.set()
    assert sum(await asyncio.gather(*calls)) == 10
    assert most == 3


async def test_a_cancelled_wait_gives_the_slot_back_when_the_call_returns() -> None:
    pool, release, started = ThreadPool[bool]("cancel", 1), threading.Event(), threading.Event()

    def call() -> bool:
        started.set()
        return release.wait(20)

    waiting = asyncio.ensure_future(pool.run(call, 20.0))
    await until(started.is_set, "the call to start")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    assert await pool.run(lambda: True, 5.0)


async def test_a_machine_that_gives_no_thread_takes_no_place_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        msg = "can't start new thread"
        raise RuntimeError(msg)

    pool = ThreadPool[int]("refused", 1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await pool.run(lambda: 1, 5.0)
    async with asyncio.timeout(5):
        assert await pool.run(lambda: 1, 5.0) == 1
