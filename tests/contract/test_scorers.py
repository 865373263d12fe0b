"""What every kind of scorer keeps: services/reward/scorers/base.py."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping

import pytest

from sao.tasks.base import UnscorableError
from services.reward.scorers.base import DeadlinePassedError
from tests.support.scorers import COMPONENTS, GOOD, Behaviour, Build, request, scorers_of
from tests.support.waiting import eventually


@pytest.fixture
def behaviour() -> Behaviour:
    return Behaviour()


@pytest.fixture(params=["memory", "python", "http", "judge"])
async def build(request: pytest.FixtureRequest, behaviour: Behaviour) -> AsyncIterator[Build]:
    async with scorers_of(request.param, behaviour) as built:
        yield built


async def test_it_gives_every_component_it_declares(build: Build) -> None:
    scorer = build()
    assert scorer.components == COMPONENTS
    assert await scorer.score(request()) == GOOD
    assert await scorer.score(request()) == GOOD


@pytest.mark.parametrize(
    "says",
    [
        {},
        {"humour": 0.5},
        {"humour": 0.5, "taste": 0.5, "more": 0.5},
        {"humour": math.nan, "taste": 0.5},
        {"humour": math.inf, "taste": 0.5},
        {"humour": "0.5", "taste": 0.5},
        {"humour": True, "taste": 0.5},
        {"humour": None, "taste": 0.5},
        {"humour": 10**400, "taste": 0.5},
    ],
    ids=lambda says: repr(says)[:40],
)
async def test_what_is_not_every_component_as_a_number_is_a_failure_and_never_a_number(
    build: Build, behaviour: Behaviour, says: Mapping[str, object]
) -> None:
    behaviour.says = says
    with pytest.raises(Exception, match=r"humour|components") as caught:
        await build().score(request())
    assert not isinstance(caught.value, UnscorableError | DeadlinePassedError | OverflowError)


async def test_a_trajectory_that_can_never_be_scored_is_told_apart(build: Build, behaviour: Behaviour) -> None:
    behaviour.raises = UnscorableError("it has no text")
    with pytest.raises(UnscorableError, match="it has no text"):
        await build().score(request())


async def test_any_other_failure_says_what_it_was(build: Build, behaviour: Behaviour) -> None:
    behaviour.raises = RuntimeError("no memory left")
    with pytest.raises(Exception, match="no memory left") as caught:
        await build().score(request())
    assert not isinstance(caught.value, UnscorableError | DeadlinePassedError)


async def test_the_deadline_ends_the_wait(build: Build, behaviour: Behaviour) -> None:
    behaviour.hangs = True
    began_s = time.monotonic()
    with pytest.raises(DeadlinePassedError):
        await build(deadline_s=0.05).score(request())
    assert time.monotonic() - began_s < 5


async def test_an_exception_of_its_own_that_looks_like_a_deadline_is_a_failure(
    build: Build, behaviour: Behaviour
) -> None:
    behaviour.raises = TimeoutError("its own")
    with pytest.raises(Exception, match="its own") as caught:
        await build().score(request())
    assert not isinstance(caught.value, DeadlinePassedError)


async def test_no_more_calls_run_than_it_may_and_the_wait_for_a_turn_is_not_counted(
    build: Build, behaviour: Behaviour
) -> None:
    behaviour.hangs = True
    scorer = build(concurrency=2, deadline_s=5.0)
    calls = [asyncio.ensure_future(scorer.score(request())) for _ in range(5)]
    await eventually(lambda: behaviour.running == 2, what="two calls to run")
    behaviour.release.set()
    assert await asyncio.gather(*calls) == [GOOD] * 5
    assert behaviour.most == 2


async def test_the_event_loop_goes_on_meanwhile(build: Build, behaviour: Behaviour) -> None:
    behaviour.hangs = True
    call = asyncio.ensure_future(build().score(request()))
    await eventually(lambda: behaviour.running == 1, what="the call to run")
    turns = 0
    while turns < 100:  # a loop that were blocked would never come here
        await asyncio.sleep(0)
        turns += 1
    assert not call.done()
    behaviour.release.set()
    assert await call == GOOD


async def test_a_cancelled_call_gives_its_place_back(build: Build, behaviour: Behaviour) -> None:
    behaviour.hangs = True
    scorer = build(concurrency=1)
    call = asyncio.ensure_future(scorer.score(request()))
    await eventually(lambda: behaviour.running == 1, what="the call to run")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    behaviour.release.set()
    assert await scorer.score(request()) == GOOD
