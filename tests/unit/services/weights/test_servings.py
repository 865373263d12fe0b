"""What is noted when an engine serves a version, and the time of a preference from its PUT to there."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from sao.adaptation import SERVED_FILE, first_served
from sao.board.memory import MemoryBoard
from sao.preference import Preference, PreferenceDocument
from sao.preference_changes import Kept
from sao.streams.base import StreamUnavailableError
from sao.weights.manifest import Manifest
from services.weights.servings import Servings
from tests.support.versions import manifest_for, write_toy_checkpoint
from tests.unit.services.weights.world import World

DOCUMENT = PreferenceDocument(name="p", weights={"a": 1.0})


def adaptation() -> float:
    return REGISTRY.get_sample_value("sao_weights_adaptation_seconds") or 0.0


def manifest(folder: Path, version: int, preference: int) -> Manifest:
    made = manifest_for(f"v{version:08d}", write_toy_checkpoint(folder / "checkpoint", 0))
    return made.model_copy(update={"preference": preference})


async def test_the_first_serving_of_a_newer_preference_is_measured_from_its_put(tmp_path: Path) -> None:
    board, clock = MemoryBoard(), [100.0]
    kept = [Preference(version=n, document=DOCUMENT, stored_s=90.0 + n) for n in (1, 2)]
    await board.restore_preferences(Kept.of([], older=kept))
    servings = Servings(board, tmp_path, wall_clock=lambda: clock[0])
    before = adaptation()
    await servings.note("engine-0", manifest(tmp_path, 1, 1))
    await servings.note("engine-0", manifest(tmp_path, 2, 0))
    assert adaptation() == before, "the preference that a process meets first is no switch"

    clock[0] = 105.0
    await servings.note("engine-0", manifest(tmp_path, 3, 2))
    assert adaptation() == 13.0
    clock[0] = 106.0
    await servings.note("engine-1", manifest(tmp_path, 3, 2))
    assert adaptation() == 13.0, "the first engine counts"
    assert first_served(tmp_path) == {"v00000001": 100.0, "v00000002": 100.0, "v00000003": 105.0}


async def test_neither_a_disk_nor_a_board_that_refuses_holds_up_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = MemoryBoard()
    (tmp_path / SERVED_FILE).mkdir()

    async def away(version: int | None = None) -> Preference | None:
        msg = f"{version}: no answer within 5 s"
        raise StreamUnavailableError(msg)

    monkeypatch.setattr(board, "preference", away)
    refused = REGISTRY.get_sample_value("sao_weights_unnoted_servings_total") or 0.0
    await Servings(board, tmp_path).note("engine-0", manifest(tmp_path, 1, 1))
    assert (REGISTRY.get_sample_value("sao_weights_unnoted_servings_total") or 0.0) == refused + 1


async def test_a_keeper_notes_each_version_that_its_engine_serves(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.restore()
    for number in (1, 2):
        await world.publish(number)
        await world.settle(1.5)
    assert sorted(first_served(tmp_path)) == ["v00000001", "v00000002"]
