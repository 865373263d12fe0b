"""One small run with everything in it that a replay must get right, made once and copied for each test."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sao.board.memory import MemoryBoard
from sao.config import RunConfig, dump_run_config, load_run_config
from sao.outcome import Scored
from sao.preference import PreferenceDocument
from sao.streams.memory import MemoryStreams
from tests.support.training import World, random_trajectory
from tests.support.trajectories import ROUTING, routed_experts

SCALE = 1e30
"""A reward whose square is not finite in float32: the update that meets it is skipped."""
FIRST = PreferenceDocument(name="first", weights={"right": 1.0}, high=SCALE)
SECOND = PreferenceDocument(name="second", weights={"right": 0.5}, offset=0.25, high=SCALE)
SKIPPED = 6


def config_of(folder: Path, model: Path, *sets: str) -> RunConfig:
    base = [
        "run.name=unit",
        f'run.dir="{folder}"',
        f'model.path="{model}"',
        "trainer.trajectories_per_update=2",
        "trainer.lr=1e-3",
        "trainer.kl_coef=0.02",
        "trainer.max_lag=4",
        "critic.lr=1e-3",
        "critic.pretrain_trajectories=0",
        "critic.warmup_updates=2",
        "checkpoint.every_updates=2",
        "checkpoint.starved_after_s=3600",
    ]
    return load_run_config(None, [*base, *sets], env={})


def world_of(config: RunConfig) -> World:
    """An empty run whose folder holds its run file, as `sao up` leaves it."""
    board = MemoryBoard(claimed=True)
    assert config.model.path is not None
    config.run.dir.mkdir(parents=True)
    (config.run.dir / "run.toml").write_text(dump_run_config(config))
    return World(config, config.model.path, board=board, streams=MemoryStreams(board, samples=config.samples))


async def long_run(config: RunConfig, other: RunConfig) -> None:
    """Four lives of one run: seven updates after a warm-up of two, some of them made three times.

    | epoch | settings | makes          | because                                                           |
    |---    |---       |---             |---                                                                |
    | 1     | config   | warm-up, 1 - 5 | stopped; then the checkpoints of 4 and 5 are damaged              |
    | 2     | other    | 3              | falls back to 2, so epoch 1's 3 - 5 are abandoned; stopped        |
    | 3     | other    | 4              | killed before a checkpoint, so its 4 is abandoned too             |
    | 4     | config   | 4 - 7          | begins at 3; the sixth meets a reward that is too large           |
    """
    world = world_of(config)
    await world.board.put_preference(FIRST)
    for i in range(18):
        update = max(i // 2 - 2, 0)
        message = random_trajectory(world.rng, "unit")
        if update >= 3:
            message.segments[2].versions[0].version = "v00000003"  # several versions in one trajectory
        right = SCALE if update == SKIPPED - 1 else float(i % 2)
        outcome = Scored(components={"right": right}, value=right, scored_under=1, scoring_started_s=1.0)
        await world.deliver(message, outcome)
    await (await world.start()).run_updates(7)
    for update in (4, 5):
        (config.run.dir / "checkpoints" / f"update-{update:08d}" / "progress.json").write_text("torn")
    await world.board.put_preference(SECOND)
    world.config = other
    await (await world.start()).run_updates(1)
    third = await world.start()
    await third.run_until_crash(third.parts.ranks, "finish", at=2)
    world.config = config
    await (await world.start()).run()


@pytest.fixture(scope="session")
def made_run(tiny_checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "run"
    settings = folder, tiny_checkpoints[0], "run.updates=7"
    other = config_of(*settings, "trainer.eps_high=0.5", "critic.lr=2e-3", "trainer.gradient_clip=0.5")
    asyncio.run(long_run(config_of(*settings), other))
    return folder


@pytest.fixture
def run_folder(made_run: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(made_run, tmp_path / "copy")


@pytest.fixture
def small_run(tiny_checkpoints: tuple[Path, Path], tmp_path: Path) -> Callable[..., Path]:
    """`small_run("section.key=value", ...)`: the folder of a run of sixteen trajectories, four an update, finished."""

    def make(*sets: str) -> Path:
        folder = tmp_path / "small"
        size = ["trainer.trajectories_per_update=4", "critic.warmup_updates=0"]
        asyncio.run(_small(config_of(folder, tiny_checkpoints[0], "run.updates=4", *size, *sets)))
        return folder

    return make


async def _small(config: RunConfig) -> None:
    world = world_of(config)
    rng = random.Random(5)
    for i in range(16):
        message = random_trajectory(world.rng, "unit")
        message.prompt_id = f"p{i // 2 % 3}"
        right = rng.random()
        outcome = Scored(components={"right": right}, value=right, scored_under=1, scoring_started_s=1.0)
        routes = routed_experts(rng, message, ROUTING) if config.trainer.routing_replay else b""
        await world.deliver(message, outcome, routed_experts=routes)
    await (await world.start()).run()
