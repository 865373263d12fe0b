"""Who may leave rotation for a round: in turn, within the limit, and never the last one without need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from sao.board.base import EngineState
from sao.streams.base import StreamUnavailableError
from sao.weights.base import VersionStoreError
from services.weights.slots import Slots, Standing, half
from tests.support.waiting import eventually
from tests.unit.services.weights.world import World


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def serving(names: str, most: int | None = None, clock: Clock | None = None) -> Slots:
    slots = Slots(most, hold_s=60.0, ask_s=10.0, clock=clock or Clock())
    for name in names:
        slots.stands(name, Standing.SERVING)
    return slots


def test_half_of_the_engines_rounded_up() -> None:
    assert [half(engines) for engines in range(6)] == [1, 1, 1, 2, 2, 3]


def test_an_engine_that_is_alone_may_leave() -> None:
    assert serving("a").take("a")


def test_places_are_given_in_the_order_of_asking() -> None:
    slots = serving("abcd", 1)
    assert [slots.take(name) for name in "bac"] == [True, False, False]
    slots.give_back("b")
    slots.stands("b", Standing.SERVING)
    assert [slots.take(name) for name in "bca"] == [False, False, True], "a asked before c, and b begins anew"
    slots.give_back("a")
    slots.stands("a", Standing.SERVING)
    assert [slots.take(name) for name in "abc"] == [False, False, True]


def test_who_asks_no_more_loses_its_place() -> None:
    clock = Clock()
    slots = serving("abc", 1, clock)
    assert [slots.take(name) for name in "abc"] == [True, False, False]
    clock.now = 11.0
    slots.take("c")
    slots.give_back("a")
    slots.stands("a", Standing.SERVING)
    assert slots.take("c"), "b has not asked for longer than a place is kept"


def test_a_slot_that_never_comes_back_is_given_to_the_next() -> None:
    clock = Clock()
    slots = serving("abc", 1, clock)
    assert slots.take("a")
    clock.now = 60.0
    assert not slots.take("b")
    clock.now = 60.1
    assert slots.take("b")


def test_the_last_one_that_serves_stays_while_another_is_coming_and_goes_when_the_others_are_away() -> None:
    clock = Clock()
    slots = serving("abc", 3, clock)
    slots.stands("a", Standing.COMING)
    slots.stands("b", Standing.AWAY)
    assert not slots.take("c")
    slots.stands("a", Standing.AWAY)
    assert slots.take("c")


def test_one_that_is_coming_for_ever_counts_as_away() -> None:
    clock = Clock()
    slots = serving("ab", 2, clock)
    slots.stands("a", Standing.COMING)
    assert not slots.take("b")
    clock.now = 60.1
    assert slots.take("b")


def test_an_engine_that_left_the_fleet_holds_nothing_up() -> None:
    slots = serving("abc", 1)
    assert slots.take("a")
    assert not slots.take("b")
    slots.leave("a")
    assert slots.take("b")
    assert slots.limit == 1


@pytest.mark.parametrize(("engines", "most"), [(2, 1), (3, 2), (4, 2), (5, 3)])
def test_the_default_limit(engines: int, most: int) -> None:
    assert serving("abcde"[:engines]).limit == most


def hold_loads(world: World, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """No engine loads before the event that this returns."""
    released = asyncio.Event()
    for engine in world.engines:

        async def held(
            path: Path, version: str, *, flush: bool = True, load: Callable[..., Awaitable[None]] = engine.load
        ) -> None:
            await released.wait()
            await load(path, version, flush=flush)

        monkeypatch.setattr(engine, "load", held)
    return released


def most_out(world: World, since: int) -> int:
    """The most engines that the board showed out of rotation at once."""
    out: set[str] = set()
    counts = [0]
    for facts in world.board.history[since:]:
        (out.discard if facts.in_rotation else out.add)(facts.engine_id)
        counts.append(len(out))
    return max(counts)


@pytest.mark.parametrize(("engines", "most"), [(2, None), (3, None), (4, None), (4, 1), (3, 3)])
async def test_as_many_engines_as_allowed_leave_rotation_at_once(
    tmp_path: Path, engines: int, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, engines, engines_out_max=most)
    await world.restore()
    await world.publish(1)
    await world.settle()
    since = len(world.board.history)
    allowed = min(most or half(engines), engines - 1)
    released = hold_loads(world, monkeypatch)
    version = (await world.publish(2)).version
    stop = asyncio.Event()
    runs = [asyncio.ensure_future(keeper.run(stop)) for keeper in world.keepers]
    await eventually(lambda: most_out(world, since) >= allowed, what=f"{allowed} engines in a round at once")
    released.set()
    await eventually(
        lambda: all((k.facts.state, k.facts.version) == (EngineState.SERVING, version) for k in world.keepers),
        what="every engine at the newest version",
    )
    stop.set()
    await asyncio.gather(*runs)
    assert most_out(world, since) == allowed


async def test_one_that_serves_nobody_does_not_wait_behind_one_that_does(tmp_path: Path) -> None:
    world = World(tmp_path, 3, engines_out_max=1)
    await world.restore()
    await world.publish(1)
    await world.settle()
    world.engines[2].restart()
    await world.settle(1.5)
    world.engines[2].faults.unreachable = True
    world.now += 1.5
    await world.keepers[2].step()
    assert world.keepers[2].facts.state is EngineState.QUARANTINED
    world.engines[2].faults.unreachable = False
    assert world.slots.take("engine-0"), "a round of another engine that does not end"
    version = (await world.publish(2)).version
    world.now += 1.5
    await world.keepers[1].step()
    assert world.keepers[1].facts.in_rotation, "it serves, so it waits"
    await world.keepers[2].step()
    assert (world.keepers[2].facts.state, world.keepers[2].facts.version) == (EngineState.SERVING, version)


@pytest.mark.parametrize("how", ["hang", "refuse", "scramble", "board", "store"])
async def test_a_slot_comes_back_whatever_the_round_came_to(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, 2)
    await world.restore()
    await world.publish(1)
    await world.settle()
    version = (await world.publish(2)).version
    faults = world.engines[0].faults
    with monkeypatch.context() as patch:
        if how in {"hang", "refuse"}:
            setattr(faults, how, {"load"})
        elif how == "scramble":
            faults.scramble_load = True
        elif how == "board":
            world.board.outage_at = EngineState.LOADING
        else:
            patch.setattr(world.store, "lease", partial(_no_serving_lease, world.store.lease))
        with contextlib.suppress(StreamUnavailableError, VersionStoreError):
            await world.keepers[0].step()
        assert world.slots.holders == frozenset()
        assert (await world.facts()).version == version, "it was in a round"
    faults.hang, faults.refuse, faults.scramble_load = (), (), False
    await world.settle()
    assert [keeper.facts.version for keeper in world.keepers] == [version, version]


async def test_the_last_one_goes_when_the_version_cannot_be_rolled_out_otherwise(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    await world.restore()
    await world.publish(1)
    await world.settle()
    world.engines[0].faults.hang = {"load"}
    version = (await world.publish(2)).version
    await world.keepers[0].step()
    before = len(world.board.history)
    await world.keepers[1].step()
    assert len(world.board.history) == before, "engine-0 has an attempt left"
    await world.settle()
    assert [keeper.facts.state for keeper in world.keepers] == [EngineState.QUARANTINED, EngineState.SERVING]
    assert world.keepers[1].facts.version == version


def _no_serving_lease(lease: Callable[[str, str], None], version: str, holder: str) -> None:
    if not holder.endswith(".loading"):
        msg = f"no lease of {version} for {holder}"
        raise VersionStoreError(msg)
    lease(version, holder)


async def test_an_engine_that_hangs_holds_no_version_back_while_it_is_tried_again(tmp_path: Path) -> None:
    """A stopped process takes connections: each call to it ends at the deadline, and there are many."""
    world = World(tmp_path, engines=2)
    await world.restore()
    await world.publish(1)
    await world.settle()
    hung, sound = world.keepers
    engine = world.engines[0]
    engine.faults.hang = {"model_info", "release", "pause", "load", "checksums", "resume", "score", "generate"}
    version = (await world.publish(2)).version
    for _ in range(4):
        await hung.step()
    assert (await world.facts()).state is EngineState.QUARANTINED
    engine.deadline_s = 60.0
    world.now += 3600.0
    asked = len(engine.calls)
    trying = asyncio.create_task(hung.step())
    await eventually(lambda: len(engine.calls) > asked, what="the engine to be asked again")
    for _ in range(3):
        await sound.step()
    assert (await world.facts(1)).version == version
    trying.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await trying


async def test_an_engine_that_serves_no_more_keeps_no_place_before_those_that_do(tmp_path: Path) -> None:
    world = World(tmp_path, engines=3, engines_out_max=1)
    await world.restore()
    await world.publish(1)
    await world.settle()
    await world.publish(2)
    _, second, third = world.keepers
    assert world.slots.take("engine-0")
    await second.step()
    await third.step()
    world.engines[1].faults.refuse = {"model_info"}
    await second._still_serves()
    world.slots.give_back("engine-0")
    world.slots.stands("engine-0", Standing.SERVING)
    world.engines[1].faults.refuse = {"pause"}
    world.now += 1.5
    await second.step()
    assert world.slots.take("engine-2")
