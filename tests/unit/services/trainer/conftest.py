"""A fresh world for each trainer test, and the settings that make its runs small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sao.board.memory import MemoryBoard
from sao.config import load_run_config
from sao.streams.memory import MemoryStreams
from tests.support.training import World

NewWorld = Callable[..., World]


@pytest.fixture
def new_world(tiny_checkpoints: tuple[Path, Path], tmp_path: Path) -> NewWorld:
    """`new_world("section.key=value", ..., folder="run")`: an empty run; two trajectories an update, no warm-up."""

    def make(*sets: str, folder: str = "run") -> World:
        base = [
            "run.name=unit",
            f'run.dir="{tmp_path / folder}"',
            "trainer.trajectories_per_update=2",
            "trainer.lr=1e-3",
            "critic.lr=1e-3",
            "critic.pretrain_trajectories=0",
            "critic.warmup_updates=0",
            "trainer.max_lag=100",
            "checkpoint.starved_after_s=3600",
        ]
        board = MemoryBoard(claimed=True)
        config = load_run_config(None, [*base, *sets], env={})
        return World(config, tiny_checkpoints[0], board=board, streams=MemoryStreams(board, samples=config.samples))

    return make
