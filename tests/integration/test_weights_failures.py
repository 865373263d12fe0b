"""Every failure of a real SGLang server at a weight update, but those that end it: `make prove-weights` has all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.weights.failures import FAILURES, Failure, World, fleet_of, provoke

if TYPE_CHECKING:
    from tests.support.engine import EngineServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
async def world(
    sglang_engine: EngineServer, tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> AsyncIterator[World]:
    async with fleet_of([sglang_engine], tiny_checkpoints, tmp_path) as made:
        yield made
    sglang_engine.load_launched()


@pytest.mark.parametrize(
    "failure", [failure for failure in FAILURES if not failure.ends_engine], ids=lambda failure: failure.name
)
async def test_it_is_noticed_and_a_good_version_serves(failure: Failure, world: World) -> None:
    found = await provoke(failure, world)
    assert found["problems"] == []
