"""A trainer killed at any place and started again makes the updates of one that was never killed, bit for bit.

Real processes, real DeepSpeed, a real Valkey; both runs are fed the same trajectories in the same order.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sao.board
import sao.streams
from sao.archive import Archive
from sao.config import RunConfig, dump_run_config, load_run_config
from sao.rows import CRITIC_ONLY
from sao.v1 import archive_pb2
from sao.weights.filesystem import FileSystemVersionStore
from services.trainer.checkpoint import Checkpoint, CheckpointStore
from tests.support.killed_services import Nursery, nursery
from tests.support.training import PREFERENCE, World, random_trajectory

UPDATES = 6
PER_UPDATE = 4
MACHINE = {"queue_depth", "queue_age_s", "update_s", "idle_s", "unsettled"}
"""Metrics that tell of the machine, not of the model."""


@dataclass(frozen=True)
class Course:
    """A run of one algorithm, and how its trainer ends again and again.

    A checkpoint is due after every second step of a life: what a life makes again, the one before had not saved.
    """

    settings: Sequence[str]
    lives: Sequence[tuple[str, Sequence[int]]]
    """Where each ends, and the updates that it makes until then."""
    samples: int = 1
    warm_up: int = 0

    @property
    def ends(self) -> list[str]:
        return [end for end, _ in self.lives]


COURSES = {
    "sao": Course(
        ["critic.pretrain_trajectories=0", "critic.warmup_updates=1"],
        [
            ("archived:3", [0, 1, 2]),
            ("published:2", [2]),
            ("saving:1", [2, 3]),
            ("saved:1", [2, 3]),
            ("stepped:1", []),
            ("end", [4, 5, 6]),
        ],
        warm_up=1,
    ),
    "spo": Course(
        [],
        [
            ("archived:3", [1, 2, 3]),
            ("published:2", [3]),
            ("saving:1", [3, 4]),
            ("saved:1", [3, 4]),
            ("stepped:1", []),
            ("end", [5, 6]),
        ],
    ),
    "grpo_dis": Course(
        ["group.size=2"],
        [
            ("holding:11", [1]),  # two groups begun and not whole, no checkpoint yet
            ("holding:18", [1, 2]),  # one of them begun before the checkpoint, one after it
            ("saving:1", [3, 4]),
            ("saved:1", [3, 4]),
            ("archived:1", [5]),
            ("end", [5, 6]),
        ],
        samples=2,
    ),
}


def configured(base: RunConfig, algorithm: str, stage: int, model: Path, folder: Path) -> RunConfig:
    sets = [
        f"run.name=test-{uuid.uuid4().hex[:12]}",
        f'run.dir="{folder}"',
        f"run.updates={UPDATES}",
        f'redis.url="{base.redis.url}"',
        f'model.path="{model}"',
        f"trainer.algorithm={algorithm}",
        f"trainer.zero_stage={stage}",
        f"trainer.trajectories_per_update={PER_UPDATE}",
        "trainer.device=cpu",
        "trainer.dtype=float32",
        "trainer.lr=1e-3",
        "critic.lr=1e-3",
        "trainer.kl_coef=0.02",
        "trainer.max_lag=50",
        "checkpoint.every_updates=2",
        *COURSES[algorithm].settings,
    ]
    return load_run_config(None, sets, env={})


async def feed(world: World, course: Course) -> None:
    """Everything that the run will train on; members of neighbouring groups come in turns."""
    rng = random.Random(7)
    count = (UPDATES + course.warm_up) * PER_UPDATE
    places = [divmod(slot, course.samples) for slot in range(count + course.samples)]
    if course.samples > 1:
        for first in range(1, len(places) - 1, 2):
            places[first], places[first + 1] = places[first + 1], places[first]
    await world.board.put_preference(PREFERENCE)
    for ordinal, sample in places:
        trajectory = random_trajectory(rng, world.config.run.name)
        trajectory.sample, trajectory.prompt_id = sample, f"p{ordinal % 3}"
        trajectory.id = str(uuid.UUID(int=uuid.UUID(trajectory.id).int >> 64 << 64 | 0b10 << 62 | rng.getrandbits(62)))
        await world.deliver(trajectory, place=(ordinal, sample), reward=float(rng.random() < 0.5))


@pytest.fixture(scope="module")
def trainers() -> Iterator[Nursery]:
    """Where trainers come from."""
    with nursery("deepspeed") as started:
        yield started


async def trained(trainers: Nursery, config: RunConfig, course: Course, model: Path, ends: Sequence[str]) -> None:
    """Feed a run and let its trainer live until each of these ends."""
    config.run.dir.mkdir(parents=True)
    path, log = config.run.dir / "run.toml", config.run.dir / "trainer.log"
    path.write_text(dump_run_config(config))
    world = World(config, model, streams=sao.streams.connect(config), board=sao.board.connect(config))
    await feed(world, course)
    await world.streams.close()
    await world.board.close()
    trainers.live(log, path, *ends)


def made(step: archive_pb2.ArchivedUpdate) -> dict[str, Any]:
    """Everything that an update computed, as the archive has it: losses, norms, values, advantages, ratios, weights."""
    return {
        "metrics": {name: value for name, value in step.metrics.items() if name not in MACHINE},
        "rates": (step.policy_lr, step.critic_lr),
        "trajectories": [
            (
                one.trajectory.segments[0].token_ids[:],
                one.reward,
                *(list(getattr(one, name)) for name in ("values", "advantages", "ratios", "weights")),
                dict(one.version_lags),
            )
            for one in step.trajectories
        ],
    }


def position(step: archive_pb2.ArchivedUpdate) -> tuple[int, int]:
    return step.update, int(step.metrics.get(CRITIC_ONLY, 0))


def last_checkpoint(config: RunConfig) -> Checkpoint:
    found = CheckpointStore(config.run.dir / "checkpoints", config.run.name, 3, 0, 0).newest()
    assert found is not None
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("algorithm", COURSES)
async def test_killed_and_resumed_equals_uninterrupted(
    trainers: Nursery,
    run_config: RunConfig,
    tiny_checkpoints: tuple[Path, Path],
    tmp_path: Path,
    algorithm: str,
    stage: int,
) -> None:
    course, model = COURSES[algorithm], tiny_checkpoints[0]
    whole, killed = (
        configured(run_config, algorithm, stage, model, tmp_path / name) for name in ("uninterrupted", "killed")
    )
    await trained(trainers, whole, course, model, ["end"])
    await trained(trainers, killed, course, model, course.ends)

    reference = Archive(whole.run.dir / "archive")
    expected = {position(step): made(step) for step in map(reference.load, reference.steps())}
    assert len(expected) == UPDATES + course.warm_up
    archive = Archive(killed.run.dir / "archive")
    found = [archive.load(name) for name in archive.steps()]
    assert {position(step) for step in found} == set(expected)
    lives = [[step.update for step in found if step.trainer_epoch == epoch + 1] for epoch in range(len(course.lives))]
    assert lives == [updates for _, updates in course.lives]
    for step in found:
        assert made(step) == expected[position(step)], f"epoch {step.trainer_epoch}, update {step.update}"

    checkpoints = [last_checkpoint(config) for config in (whole, killed)]
    names = sorted(file.name for file in checkpoints[0].backend_dir.iterdir())
    assert {"policy.safetensors", "policy-optimizer.safetensors"} <= set(names)
    for name in names:
        bytes_of = [(checkpoint.backend_dir / name).read_bytes() for checkpoint in checkpoints]
        assert bytes_of[0] == bytes_of[1], name
    assert checkpoints[0].progress.baseline == checkpoints[1].progress.baseline
    served = []
    for config, checkpoint in zip((whole, killed), checkpoints, strict=True):
        manifest = FileSystemVersionStore(config.versions_dir, 0).manifest(checkpoint.progress.version)
        served.append([(tensor.name, tensor.sha256) for tensor in manifest.tensors])
    assert served[0] == served[1]
