"""Engines of which release are kept: tested, accepted with a warning, or refused and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from sao.board.base import EngineState
from services.weights.engines.releases import TESTED, UnsupportedReleaseError, is_tested
from tests.unit.services.weights.world import World


@pytest.mark.parametrize("release", ["0.5.21", "0.5.22", "0.5.21.post1", "0.5.24.dev3+g12ab", "0.6.0", "1.0.0"])
def test_the_others_from_the_oldest_on_are_not_tested(release: str) -> None:
    assert not is_tested("engine-0", release)


def test_the_tested_release_is_tested() -> None:
    assert is_tested("engine-0", TESTED)


@pytest.mark.parametrize("release", ["0.5.20", "0.4.99", "0.5.6.post2", "", "main", "v0.5.23"])
def test_older_or_unreadable_ones_are_refused(release: str) -> None:
    with pytest.raises(UnsupportedReleaseError) as caught:
        is_tested("engine-3", release)
    for part in ("engine-3", repr(release), "expected 0.5.21 or newer", "install sglang==0.5.23"):
        assert part in str(caught.value)


async def test_an_engine_of_an_old_release_is_quarantined_and_nothing_is_tried_on_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine = world.engines[0]
    engine.release = "0.5.20"
    await world.restore()
    version = (await world.publish(1)).version
    for _ in range(5):
        await world.settle(1.5)
    assert set(engine.calls) == {"model_info", "release"}
    assert world.board.states() == ["starting", "quarantined"], "said once"
    assert "'0.5.20', expected 0.5.21 or newer" in (await world.facts()).error
    engine.release = "0.5.22"
    engine.restart()
    await world.settle(1.5)
    facts = await world.facts()
    assert (facts.state, facts.version, facts.error) == (EngineState.SERVING, version, "")


async def test_an_engine_restarted_as_an_old_release_leaves_rotation_for_good(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.restore()
    await world.publish(1)
    await world.settle()
    engine = world.engines[0]
    engine.release = "0.5.20"
    engine.restart()
    calls = len(engine.calls)
    await world.settle(1.5)
    await world.settle(1.5)
    facts = await world.facts()
    assert facts.state is EngineState.QUARANTINED
    assert "0.5.20" in facts.error
    assert "load" not in engine.calls[calls:]


async def test_an_engine_that_died_in_a_round_and_came_back_as_an_old_release_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.restore()
    await world.publish(1)
    await world.settle()
    engine = world.engines[0]
    engine.faults.hang = {"load"}
    await world.publish(2)
    await world.keepers[0].step()
    engine.faults.hang = ()
    engine.release = "0.5.20"
    engine.restart()
    calls = len(engine.calls)
    await world.settle(1.5)
    assert "0.5.20" in (await world.facts()).error
    assert "load" not in engine.calls[calls:]
