"""A slice of `make prove-transitions`: the engine killed in the middle of a load; the proof does it in every state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.transitions.run import kill_engine_in
from sao.board.base import EngineState
from tests.support.engine import EngineServer
from tests.support.weights_run import WeightsRun, weights_run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture
def engine(sglang_engine: EngineServer) -> Iterator[EngineServer]:
    """The session's: whoever comes next finds it as it was launched."""
    yield sglang_engine
    if not sglang_engine.runs:
        sglang_engine.start()
    sglang_engine.load_launched()


@pytest.fixture
def run(
    valkey_url: str, engine: EngineServer, tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> Iterator[WeightsRun]:
    with weights_run(tmp_path, valkey_url, engine.url, tiny_checkpoints) as made:
        yield made


async def test_an_engine_killed_while_it_loads_comes_back_with_the_newest_version(
    run: WeightsRun, engine: EngineServer
) -> None:
    found = await kill_engine_in(EngineState.LOADING, run, engine)
    assert found["problems"] == []
    assert found["state_then"] == "quarantined"
