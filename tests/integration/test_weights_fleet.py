"""A slice of `make prove-weights`: four versions under continuous generation, on one engine that nobody strikes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.weights.fleet import Faults, prove_on

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
