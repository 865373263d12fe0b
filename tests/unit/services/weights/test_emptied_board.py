"""A board that lost what it knew: engine facts are written again, and no version goes back because of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sao.board.base import EngineState, TrainerFacts, TrainerState
from sao.streams.base import StreamUnavailableError
from sao.weights.manifest import Manifest
from tests.support.versions import announce
from tests.unit.services.weights.world import World


@pytest.fixture
async def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    await made.restore()
    return made


async def name_again(world: World, manifest: Manifest, *, epoch: int) -> None:
    """A trainer of that epoch names a version that is there already."""
    facts = TrainerFacts(
        epoch=epoch, update=manifest.update, version=manifest.version, consumed=0, state=TrainerState.TRAINING
    )
    await world.board.write_trainer(facts)


async def serving(world: World, *seeds: int) -> list[Manifest]:
    """Publish these one after the other, each served before the next."""
    found = []
    for seed in seeds:
        found.append(await world.publish(seed))
        await world.settle(1.5)
    return found


async def test_the_facts_of_a_serving_engine_are_written_again_and_it_goes_on(world: World) -> None:
    await serving(world, 1)
    before, loads = await world.facts(), world.engines[0].calls.count("load")
    world.board.empty()
    await world.fleet.follow()
    await world.settle(1.5)
    assert await world.facts() == before
    assert world.engines[0].calls.count("load") == loads


async def test_the_facts_of_engines_that_do_not_serve_are_written_again(world: World) -> None:
    world.board.empty()
    await world.settle(1.5)
    assert (await world.facts()).state is EngineState.STARTING
    world.engines[0].faults.scramble_load = True
    await world.publish(1)
    await world.settle(1.5)
    world.board.empty()
    await world.settle(1.5)
    facts = await world.facts()
    assert facts.state is EngineState.QUARANTINED
    assert "canary" in facts.error


async def test_a_board_that_has_its_facts_is_not_written_to(world: World) -> None:
    await serving(world, 1)
    written = len(world.board.history)
    for _ in range(10):
        await world.settle(1.5)
    assert len(world.board.history) == written


async def test_the_board_is_read_once_a_second_for_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await serving(world, 1)
    reads = 0
    engines = world.board.engines

    async def counted() -> object:
        nonlocal reads
        reads += 1
        return await engines()

    monkeypatch.setattr(world.board, "engines", counted)
    for _ in range(40):
        await world.settle(0.05)
    assert 1 <= reads <= 3


async def test_an_older_state_on_the_board_is_corrected(world: World) -> None:
    """A store that lost its last second says that the engine serves what it served before."""
    (first, second) = await serving(world, 1, 2)
    old = next(facts for facts in world.board.history if facts.in_rotation and facts.version == first.version)
    await world.board.write_engine(old)
    await world.settle(1.5)
    assert (await world.facts()).version == second.version


async def test_an_engine_that_restarted_meanwhile_is_not_said_to_serve(world: World) -> None:
    (version,) = await serving(world, 1)
    world.board.empty()
    world.board.history.clear()
    world.engines[0].restart()
    await world.settle(1.5)
    assert world.board.states() == ["quarantined", "quiescing", "quiesced", "loading", "verifying", "serving"]
    assert (await world.facts()).version == version.version


async def test_an_engine_that_restarted_while_the_board_was_away_is_not_said_to_serve(world: World) -> None:
    version = await world.publish(1)
    world.board.outage_at = EngineState.SERVING
    with pytest.raises(StreamUnavailableError):
        await world.settle()
    written = len(world.board.history)
    world.engines[0].restart()
    await world.settle()
    assert world.board.history[written].state is EngineState.QUARANTINED
    assert (await world.facts()).version == version.version
    assert (await world.facts()).in_rotation


async def test_a_service_that_starts_on_an_emptied_board_waits_for_the_trainer(world: World) -> None:
    await serving(world, 1, 2)
    world.board.empty()
    world.start()
    await world.restore()
    loads = world.engines[0].calls.count("load")
    await world.fleet.follow()
    await world.settle(1.5)
    assert (await world.facts()).state is EngineState.STARTING
    assert world.engines[0].calls.count("load") == loads
    newest = await world.publish(3)
    await world.settle(1.5)
    assert (await world.facts()).version == newest.version
    assert (await world.facts()).in_rotation


async def test_what_was_proven_is_remembered_without_the_board(world: World) -> None:
    (good,) = await serving(world, 1)
    world.board.empty()
    world.start()
    await world.restore()
    world.engines[0].faults.ignore_load = True
    bad = await world.publish(2)
    await world.settle(1.5)
    assert bad.version in world.fleet.refused
    assert (await world.facts()).version == good.version
    assert (await world.facts()).in_rotation


@pytest.mark.parametrize("restarted", [False, True], ids=["the same process", "its successor"])
async def test_a_board_from_before_does_not_take_the_engine_back(world: World, restarted: bool) -> None:
    (older, newest) = await serving(world, 1, 2)
    world.board.empty()
    if restarted:
        world.start()
        await world.restore()
    await announce(world.board, older)
    loads = world.engines[0].calls.count("load")
    assert not await world.fleet.follow()
    await world.settle(1.5)
    assert world.engines[0].calls.count("load") == loads
    await announce(world.board, newest)
    await world.fleet.follow()
    await world.settle(1.5)
    assert (await world.facts()).version == newest.version


async def test_a_trainer_that_started_since_may_name_an_older_version(world: World) -> None:
    """One that holds its publishing back names what it restored."""
    (older, _) = await serving(world, 1, 2)
    await name_again(world, older, epoch=await world.board.new_trainer_epoch())
    assert await world.fleet.follow()
    await world.settle(1.5)
    assert (await world.facts()).version == older.version
