"""Slices of `make prove-weights`: a few versions under continuous generation, on one engine that nobody strikes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.weights.fleet import Faults, prove_on
from bench.weights.rollback import prove_on as roll_back_on

if TYPE_CHECKING:
    from tests.support.engine import EngineServer


@pytest.mark.engine
@pytest.mark.timeout(300)
async def test_every_token_is_of_a_verified_version_and_has_its_log_prob(
    sglang_engine: EngineServer, valkey_url: str, tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    found = await prove_on(tmp_path, valkey_url, [sglang_engine], tiny_checkpoints[0], publishes=4, faults=Faults())
    sglang_engine.load_launched()
    assert found["problems"] == []
    assert found["versions_sampled"] == 4
    assert found["trajectories_of_two_versions"] > 0


@pytest.mark.engine
@pytest.mark.timeout(300)
async def test_a_rollback_under_load_serves_the_old_version_until_publishing_is_resumed(
    sglang_engine: EngineServer, valkey_url: str, tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    found = await roll_back_on(tmp_path, valkey_url, [sglang_engine], tiny_checkpoints[0], times=2)
    sglang_engine.load_launched()
    # Other tests share the machine: how long it takes is judged by `make prove-weights`.
    assert [problem for problem in found["problems"] if not problem.startswith("a rollback takes")] == []
    assert len(found["seconds"]["rollbacks"]) == 2
