"""Killed (SIGKILL) at every transition between a published trajectory and a trained, durable, acknowledged one.

Real processes, real Valkey. Each row of the tables dies at its place twice, proves it by what it leaves behind, and is
followed by a life that may finish; then each trajectory has one fate, and versions have only gone forward.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

import sao.board
import sao.streams
from sao.archive import Archive
from sao.board.base import TrainerState
from sao.config import RunConfig, dump_run_config, load_run_config
from sao.config.schema import FeedbackSection
from sao.outcome import Scored
from sao.preference import PreferenceDocument
from sao.rows import read_rows
from sao.streams.base import StreamName
from sao.streams.room import Feedback, Heard
from sao.weights.filesystem import FileSystemVersionStore
from services.trainer.checkpoint import CheckpointStore
from services.trainer.consumer import MAX_RESCORES
from services.trainer.drops import read_drops
from tests.chaos.audit import audit
from tests.chaos.evidence import final_progress, gather
from tests.support.killed_services import END, Nursery, nursery
from tests.support.training import PREFERENCE, World, random_trajectory

pytestmark = pytest.mark.timeout(180)

UPDATES, PER_UPDATE = 4, 2
FEED = ["train", "drop", "train", "bury", "drop", "train", "bury", "train", "train", "train", "train", "train"]
"""What becomes of each: the first update takes three of them, the second five, and then a checkpoint is due."""
SPOILT: dict[str, dict[str, Any]] = {
    "train": {},
    "drop": {
        "outcome": Scored(components={"left": 1.0}, value=1.0, scored_under=9, scoring_started_s=1.0),
        "rescores": MAX_RESCORES,
    },
    "bury": {"payload": b"\xff"},
}
FATES = {"trained": UPDATES * PER_UPDATE, "dropped": 2, "dead": 2}

Left = Mapping[str, int]
"""What must lie there after the first crash; see `Run.scene`."""

TRANSITIONS: dict[str, tuple[str, Left]] = {
    "before the optimiser step": ("before the step:2", {"steps": 1, "versions": 2, "checkpoints": 0, "scored": 8}),
    "after the optimiser step": ("stepped:2", {"steps": 1, "versions": 2, "checkpoints": 0, "scored": 8}),
    "before the step record": ("before the record:2", {"steps": 1, "rows": 1}),
    "after the step record": ("archived:2", {"steps": 2, "rows": 1, "versions": 2}),
    "a version's name is taken": ("allocated:2", {"steps": 1, "staged": 1, "staged_files": 0, "versions": 1}),
    "a version's files are written": ("written:2", {"staged": 1, "staged_manifests": 0, "versions": 1}),
    "a version's manifest is written": ("manifested:2", {"staged": 1, "staged_manifests": 1, "versions": 1}),
    "a version is committed": ("committed:2", {"staged": 0, "versions": 2, "announced": 1}),
    "a version is announced": ("announced:2", {"versions": 2, "announced": 2, "rows": 0, "told": 1}),
    "a checkpoint is sealed": ("sealed:1", {"steps": 2, "checkpoints": 0, "unfinished": 1, "scored": 8}),
    "before a checkpoint's rename": ("replacing:1", {"checkpoints": 0, "unfinished": 1, "scored": 8}),
    "after a checkpoint's rename": ("renamed:1", {"checkpoints": 1, "unfinished": 0, "scored": 8}),
    "before the acknowledgement": ("saved:1", {"checkpoints": 1, "scored": 8}),
    "after the acknowledgement": ("settled:1", {"checkpoints": 1, "scored": 4}),
    "before a drop is settled": ("dropping:1", {"drops": 1, "scored": 12, "rows": 0}),
    "after a drop is settled": ("dropped:1", {"drops": 1, "scored": 11, "rows": 0}),
    "before a burial": ("before the burial:1", {"drops": 2, "dead": 0, "scored": 11}),
    "after a burial": ("buried:1", {"drops": 2, "dead": 1, "scored": 10}),
}
MOVES: dict[str, tuple[str, int, Left]] = {
    "before the move": ("before the move:2", 1, {"unscored": 7, "scored": 1}),
    "after the move": ("moved:2", 2, {"unscored": 6, "scored": 2}),
}
"""Place, trajectories that a life moves until then, what lies there."""

UNANSWERED, ANSWERED = 3, UPDATES * PER_UPDATE
WAITS: dict[str, Left] = {
    "before the parking:2": {"unscored": UNANSWERED + ANSWERED - 1, "waiting": 1},
    "parked:2": {"unscored": UNANSWERED + ANSWERED - 2, "waiting": 2},
    "before the join:2": {},
    "joined:2": {},
    "before the expiry:1": {"dead": 0, "scored": ANSWERED, "waiting": UNANSWERED},
    "expired:1": {"dead": 1, "scored": ANSWERED, "waiting": UNANSWERED - 1},
}
"""What must lie there after the first crash. A join has no exact place: a sweep may be faster than whoever parked."""


@dataclass
class Run:
    """One run whose processes live and die."""

    world: World
    log: Path
    services: Nursery
    scenes: list[dict[str, int]] = field(default_factory=list)
    """After each life."""
    seen: dict[str, str] = field(default_factory=dict)
    """Every version that a reader could ever find: its manifest."""

    @property
    def config(self) -> RunConfig:
        return self.world.config

    @property
    def versions(self) -> FileSystemVersionStore:
        return FileSystemVersionStore(self.config.versions_dir, 0)

    @property
    def checkpoints(self) -> CheckpointStore:
        return CheckpointStore(self.config.run.dir / "checkpoints", self.config.run.name, 3, 0, 0)

    async def live(self, *ends: str) -> None:
        for end in ends:
            self.services.live(self.log, self.config.run.dir / "run.toml", end)
            self.scenes.append(await self.scene())
            self.check_versions()

    async def scene(self) -> dict[str, int]:
        folder, streams, versions = self.config.run.dir, self.world.streams, self.versions.names()
        staged = list((self.config.versions_dir / "staging").iterdir())
        facts = await self.world.board.trainer()
        return {
            "steps": len(Archive(folder / "archive").steps()),
            "rows": len(list(read_rows(folder / "updates.jsonl"))),
            "checkpoints": len(list(self.checkpoints.whole())),
            "unfinished": len(list((folder / "checkpoints").glob(".*"))),
            "versions": len(versions),
            "announced": len(await self.world.board.versions()),
            "told": int(facts.version.removeprefix("v")) if facts is not None else 0,
            "staged": len(staged),
            "staged_files": sum(len(list(directory.iterdir())) for directory in staged),
            "staged_manifests": sum((directory / "manifest.json").exists() for directory in staged),
            "unscored": (await streams.depth(StreamName.TRAJECTORIES)).length,
            "scored": (await streams.depth(StreamName.SCORED)).length,
            "dead": len(await streams.dead_letters(count=100)),
            "waiting": (await streams.room.use()).waiting,
            "drops": len(list(read_drops(folder / "dropped.jsonl"))),
        }

    def check_versions(self) -> None:
        """Whatever a reader finds is whole, and the same as ever under its name."""
        for name in self.versions.names():
            self.versions.verify(name)
            manifest = self.versions.manifest(name).model_dump_json()
            assert self.seen.setdefault(name, manifest) == manifest

    async def check_end(self, acknowledged: Sequence[str], fates: Mapping[str, int]) -> None:
        """Nothing lost, nothing twice, every count right, the newest version known to all, no litter."""
        folder = self.config.run.dir
        with (folder / "acknowledged.jsonl").open("w") as file:
            for trajectory_id in acknowledged:
                file.write(json.dumps({"trajectory": trajectory_id, "status": "accepted"}) + "\n")
        with redis.Redis.from_url(self.config.redis.url) as client:
            verdict = audit(gather(folder, self.config.run.name, client))
        assert verdict.passed, verdict
        assert (verdict.fates, verdict.uncounted) == (fates, {})
        progress = final_progress(folder, self.config.run.name)
        assert (progress.update, progress.consumed) == (UPDATES, UPDATES * PER_UPDATE)

        names, announced = self.versions.names(), await self.world.board.versions()
        assert set(names) <= announced.keys()
        for name in names:
            manifest, record = self.versions.manifest(name), announced[name]
            assert (manifest.update, manifest.parent, manifest.trainer_epoch) == (
                record.update,
                record.parent,
                record.epoch,
            )
        facts = await self.world.board.trainer()
        assert facts is not None
        assert (facts.state, facts.update, facts.version) == (TrainerState.FINISHED, UPDATES, names[-1])
        assert announced[names[-1]].update == UPDATES
        told = [scene["told"] for scene in self.scenes]
        assert told == sorted(told)
        assert (self.scenes[-1]["staged"], self.scenes[-1]["unfinished"]) == (0, 0)

        interrupted = any(scene["staged"] or scene["versions"] > scene["announced"] for scene in self.scenes)
        assert ("rolled back an interrupted publication" in self.log.read_text()) is interrupted


@pytest.fixture(scope="module")
def services() -> Iterator[Nursery]:
    """Where the processes come from."""
    with nursery("torch") as started:
        yield started


@pytest.fixture
async def run(services: Nursery, run_config: RunConfig, tiny_checkpoints: tuple[Path, Path]) -> AsyncIterator[Run]:
    sets = [
        f"run.name={run_config.run.name}",
        f'run.dir="{run_config.run.dir}"',
        f"run.updates={UPDATES}",
        f'redis.url="{run_config.redis.url}"',
        f'model.path="{tiny_checkpoints[0]}"',
        f"trainer.trajectories_per_update={PER_UPDATE}",
        "trainer.max_lag=50",
        "trainer.device=cpu",
        "trainer.dtype=float32",
        "critic.pretrain_trajectories=0",
        "critic.warmup_updates=0",
        "checkpoint.every_updates=2",
        "weights.keep_versions=16",
        "reward.batch=1",
    ]
    config = load_run_config(None, sets, env={})
    config.run.dir.mkdir(parents=True)
    (config.run.dir / "run.toml").write_text(dump_run_config(config))
    world = World(config, tiny_checkpoints[0], streams=sao.streams.connect(config), board=sao.board.connect(config))
    yield Run(world, config.run.dir / "services.log", services)
    await world.streams.close()
    await world.board.close()


async def feed(world: World) -> list[str]:
    """Scored already; ids of all."""
    await world.board.put_preference(PREFERENCE)
    return [await world.deliver(**SPOILT[fate]) for fate in FEED]


def damage(checkpoints: CheckpointStore) -> Path:
    """Tear the newest checkpoint; where it lies."""
    newest = checkpoints.newest()
    assert newest is not None
    (newest.path / "progress.json").write_text("torn")
    return newest.path


@pytest.mark.parametrize("transition", TRANSITIONS)
async def test_a_trainer_killed_at_a_transition_trains_each_trajectory_once(run: Run, transition: str) -> None:
    place, left = TRANSITIONS[transition]
    ids = await feed(run.world)
    await run.live(place, place, END)
    first, *_ = run.scenes
    assert {name: first[name] for name in left} == left
    await run.check_end(ids, FATES)
    assert final_progress(run.config.run.dir, run.config.run.name).dropped == {"preference": 2, "payload_damaged": 2}


@pytest.mark.parametrize(("place", "target_is_there"), [("sealed:1", True), ("replacing:1", False)])
async def test_a_checkpoint_that_replaces_a_damaged_one_is_whole_or_not_there(
    run: Run, place: str, *, target_is_there: bool
) -> None:
    ids = await feed(run.world)
    await run.live("saved:1")
    target = damage(run.checkpoints)
    for _ in range(2):
        await run.live(place)
        assert target.exists() is target_is_there
        assert (run.scenes[-1]["checkpoints"], run.scenes[-1]["unfinished"]) == (0, 1)
    await run.live(END)
    await run.check_end(ids, FATES)


async def publish(world: World, count: int) -> list[str]:
    """Not scored yet; ids of all."""
    rng, ids = random.Random(0), []
    for ordinal in range(count):
        message = random_trajectory(rng, world.config.run.name)
        message.ordinal, message.task_payload_json = ordinal, '{"truth": "+0042"}'
        fields = {"task": message.task, "ordinal": str(ordinal)}
        await world.streams.append(message.id, message.SerializeToString(), ordinal=ordinal, sample=0, fields=fields)
        ids.append(message.id)
    return ids


@pytest.mark.parametrize("transition", MOVES)
async def test_a_reward_service_killed_at_its_move_scores_each_trajectory_once(run: Run, transition: str) -> None:
    place, moved, left = MOVES[transition]
    ids = await publish(run.world, UPDATES * PER_UPDATE)
    await run.live(place, place)
    first, second = run.scenes
    assert {name: first[name] for name in left} == left
    assert second["scored"] == 2 * moved
    await run.live(f"scored:{len(ids) - 2 * moved}", END)
    await run.check_end(ids, {"trained": len(ids)})


@pytest.mark.parametrize("place", WAITS)
async def test_a_reward_service_killed_around_feedback_joins_or_expires_each_trajectory_once(
    run: Run, place: str
) -> None:
    feedback = FeedbackSection(deadline_s=1.0)
    reward = run.config.reward.model_copy(update={"feedback": feedback})
    run.world.config = run.config.model_copy(update={"reward": reward})
    (run.config.run.dir / "run.toml").write_text(dump_run_config(run.config))
    await run.world.board.put_preference(PreferenceDocument(name="p", weights={"correct": 0.5, "feedback": 0.5}))
    streams, ids = run.world.streams, await publish(run.world, UNANSWERED + ANSWERED)
    for trajectory_id in ids[UNANSWERED:]:
        # From the future, so that no life is too slow for it: one that comes early is kept for deadline_s.
        answer = Feedback(value=0.5, at_ms=time.time_ns() // 10**6 + 3_600_000)
        assert await streams.room.answer(trajectory_id, answer, kept_max=99) is Heard.KEPT

    lives = 2 if place != "expired:1" else 1
    await run.live(*[place] * lives)
    for scene in run.scenes:
        assert sum(scene[where] for where in ("unscored", "waiting", "scored", "dead")) == len(ids)
    assert {name: run.scenes[0][name] for name in WAITS[place]} == WAITS[place]
    while (left := ANSWERED - run.scenes[-1]["scored"]) > 0:
        await run.live(f"all joined:{left}")
    while (left := UNANSWERED - run.scenes[-1]["dead"]) > 0:
        await run.live(f"all expired:{left}")
    assert {name: run.scenes[-1][name] for name in ("unscored", "waiting", "scored", "dead")} == {
        "unscored": 0,
        "waiting": 0,
        "scored": ANSWERED,
        "dead": UNANSWERED,
    }
    assert {letter.kind for letter in await streams.dead_letters(count=9)} == {"timeout"}
    await run.live(END)
    await run.check_end(ids, {"trained": ANSWERED, "dead": UNANSWERED})
