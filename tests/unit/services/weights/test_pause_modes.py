"""What becomes of running turns, and of the prefix cache, in each way to pause."""

from __future__ import annotations

from pathlib import Path

import pytest

from sao.board.base import EngineState
from services.weights.canary import probe_prompt
from services.weights.engines.base import PauseMode
from tests.unit.services.weights.world import SERVED, World


async def serving(folder: Path, mode: PauseMode) -> World:
    """An engine at seed 1."""
    world = World(folder, mode=mode)
    await world.restore()
    await world.publish(1)
    await world.settle()
    return world


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_serving_engine_is_paused_as_the_run_says(tmp_path: Path, mode: PauseMode) -> None:
    world = await serving(tmp_path, mode)
    seen = len(world.board.history)
    version = (await world.publish(2)).version
    await world.settle()
    assert world.engines[0].pauses[-1] is mode
    assert world.board.states()[seen:] == SERVED
    assert (await world.facts()).version == version


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.ABORT])
async def test_where_the_load_flushes_a_stale_cache_is_noticed(tmp_path: Path, mode: PauseMode) -> None:
    world = await serving(tmp_path, mode)
    world.engines[0].faults.keep_cache = True
    await world.publish(2)
    await world.settle()
    facts = await world.facts()
    assert facts.state is EngineState.QUARANTINED
    assert "stale prefix cache" in facts.error


async def test_in_place_keeps_what_is_cached_and_reads_none_of_it(tmp_path: Path) -> None:
    world = await serving(tmp_path, PauseMode.IN_PLACE)
    old = (await world.facts()).version
    engine = world.engines[0]
    manifest = await world.publish(2)
    await world.settle()
    probe = probe_prompt(manifest)
    assert (await engine.generate_one(probe, salt=old)).cached_tokens > 0, "nothing was flushed"
    assert (await world.facts()).version == manifest.version
    assert "flush" not in engine.calls


async def test_in_place_on_a_server_without_salts_is_noticed_and_made_up_for_by_a_flush(tmp_path: Path) -> None:
    world = await serving(tmp_path, PauseMode.IN_PLACE)
    engine = world.engines[0]
    engine.faults.ignore_salt = True
    version = (await world.publish(2)).version
    await world.settle()
    errors = [facts.error for facts in world.board.history if facts.state is EngineState.QUARANTINED]
    assert len(errors) == 1
    assert "stale prefix cache" in errors[0]
    assert engine.pauses[-2:] == [PauseMode.IN_PLACE, PauseMode.RETRACT]
    assert (await world.facts()).version == version


async def test_in_place_never_brings_an_engine_up_or_back(tmp_path: Path) -> None:
    world = await serving(tmp_path, PauseMode.IN_PLACE)
    engine = world.engines[0]
    assert engine.pauses == [PauseMode.RETRACT], "what it held before is unknown"
    good = (await world.facts()).version
    engine.faults.ignore_load = True
    manifest = await world.publish(2)
    await world.settle()
    assert (await world.facts()).version == good
    assert engine.pauses[1:] == [PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.RETRACT]
    assert (await engine.generate_one(probe_prompt(manifest), salt=good)).cached_tokens == 0, "the old salt is empty"


async def test_in_place_never_comes_back_to_a_version_it_has_served_since_the_last_flush(tmp_path: Path) -> None:
    """A request that the way back retracted is computed under the old weights, and cached under the new one's salt."""
    world = await serving(tmp_path, PauseMode.IN_PLACE)
    engine, old = world.engines[0], (await world.facts()).version
    manifest = await world.publish(2)
    await world.settle()
    await world.fleet.holds.pin(old, reason="", client="")
    await world.fleet.follow()
    await world.settle(1.5)
    assert (await world.facts()).version == old
    await engine.generate_one([3, 1, 2], salt=manifest.version)
    await world.fleet.holds.resume(manifest.version, reason="", client="")
    await world.fleet.follow()
    await world.settle(1.5)
    assert (await world.facts()).version == manifest.version
    assert (await engine.generate_one([3, 1, 2], salt=manifest.version)).cached_tokens == 0
    await world.publish(3)
    await world.settle(1.5)
    assert engine.pauses[-2:] == [PauseMode.RETRACT, PauseMode.IN_PLACE], "a version of which nothing can be cached"
