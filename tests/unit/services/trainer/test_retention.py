"""Archived text goes when its time is over, and never while a kept checkpoint may train it again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sao.archive import Archive, ArchiveError, StepName
from sao.ids import uuid7, uuid7_unix_ms
from sao.retention import Pass
from sao.rows import CRITIC_ONLY
from sao.v1 import archive_pb2 as pb
from services.trainer import app, metrics
from services.trainer import retention as retention_module
from services.trainer.checkpoint import CheckpointStore, Progress
from services.trainer.loop import fresh_progress
from services.trainer.replay.app import main as replay
from services.trainer.retention import ArchiveRetention
from tests.support.training import PowerFailureError, World, random_trajectory
from tests.support.waiting import eventually
from tests.unit.services.trainer.conftest import NewWorld
from tests.unit.services.trainer.test_loop import rows
from tests.unit.services.trainer.test_recovery import Run, Streams, actions

FIRST_MS = 1_700_000_000_000
SPREAD = 7
"""Trajectories begin at one of so many milliseconds, in no order."""
ABANDONED = [("step", 3), ("step", 3), ("restart", 0), ("step", 1), ("step", 1), ("checkpoint", 0)]
"""The first epoch's trajectories are trained again one by one, and a checkpoint comes before the last of them."""

BEYOND = [("step", 1), ("step", 1), ("restart", 0), ("step", 2), ("checkpoint", 0)]
"""The abandoned epoch made more steps of warm-up than the checkpoint has."""


@dataclass
class DatedRun(Run):
    """Books of a trainer whose trajectories have the ids of a real run."""

    def name(self, number: int) -> str:
        began_ms = FIRST_MS + number * 5 % SPREAD
        return str(uuid.UUID(int=began_ms << 80 | 0x7 << 76 | 0b10 << 62 | number))

    def number(self, name: str) -> int:
        return uuid.UUID(name).int & 2**62 - 1


@dataclass
class Kept:
    """Stands for the checkpoints on disk, of which the oldest is all that matters."""

    progress: Progress | None

    def oldest_progress(self) -> Progress | None:
        return self.progress


def retention(
    run: Run, kept: Progress | None, let_go: Collection[str] = (), archive: Archive | None = None
) -> ArchiveRetention:
    """Of the process that is at work now."""
    checkpoints = cast("CheckpointStore", Kept(kept))
    return ArchiveRetention(archive or run.archive, checkpoints, lambda: let_go, begun=run.begun, epoch=run.epoch)


def texts(archive: Archive) -> Iterator[tuple[StepName, pb.ArchivedUpdate, pb.TrainedTrajectory]]:
    for step in archive.steps():
        update = archive.load(step)
        yield from ((step, update, one) for one in update.trajectories)


async def lived(archive: Archive, history: Sequence[tuple[str, int]]) -> DatedRun:
    run = DatedRun(archive)
    for action, number in history:
        match action:
            case "step":
                run.step(number)
            case "checkpoint":
                run.checkpoint()
            case _:
                await run.restart(number)
    return run


@settings(max_examples=100, deadline=None)
@example(history=ABANDONED, age_ms=SPREAD, keep_last=1, crash_at=12)
@example(history=BEYOND, age_ms=SPREAD, keep_last=1, crash_at=12)
@given(history=actions, age_ms=st.integers(0, SPREAD), keep_last=st.integers(1, 3), crash_at=st.integers(1, 12))
async def test_nothing_younger_and_nothing_that_may_be_trained_again_goes_and_all_else_does(
    history: Sequence[tuple[str, int]], age_ms: int, keep_last: int, crash_at: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        archive = Archive(Path(folder))
        run = await lived(archive, history)
        floor, held, _ = run.checkpoints[-keep_last:][0] if run.checkpoints else (None, [], [])
        before_ms = FIRST_MS + age_ms

        interrupted = Archive(Path(folder))
        crash(interrupted, at=crash_at)
        with contextlib.suppress(PowerFailureError):
            retention(run, floor, archive=interrupted).erase(before_ms)
        again = retention(run, floor)
        again.erase(before_ms)

        for step, update, one in texts(archive):
            position = step.update, int(update.metrics[CRITIC_ONLY]) if step.update == 0 else 0
            over = uuid7_unix_ms(one.trajectory.id) < before_ms
            within = floor is not None and position <= (floor.update, floor.critic_only)
            assert one.forgotten == (over and within and one.trajectory.id in held), (step, one.trajectory.id)
            assert bool(one.trajectory.task_payload_json) != one.forgotten
            assert one.reward == run.number(one.trajectory.id)
        assert again.erase(before_ms).erased == 0
        assert retention(run, floor).erase(before_ms).erased == 0


def crash(archive: Archive, *, at: int) -> None:
    """Lose power at the `at`-th file that is rewritten."""
    forget_in, left = archive.forget_in, at

    def crashing(step: StepName, trajectory_ids: set[str]) -> int:
        nonlocal left
        left -= 1
        if left == 0:
            raise PowerFailureError
        return forget_in(step, trajectory_ids)

    archive.forget_in = crashing  # type: ignore[method-assign,assignment]


async def test_what_was_dropped_since_need_not_stay(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    run = await lived(archive, [("step", 1), ("step", 1), ("restart", 0)])
    dropped, kept = run.queue.pop(0), run.queue.pop(0)
    for _ in range(4):
        run.step(1)
    run.checkpoint()
    for let_go in ({dropped}, set[str]()):
        retention(run, run.checkpoints[-1][0], let_go).erase(FIRST_MS + SPREAD)
        there = {one.trajectory.id for _, _, one in texts(archive) if not one.forgotten}
        assert there == {kept}


async def test_what_lies_beyond_the_oldest_checkpoint_stays_though_it_was_dropped(tmp_path: Path) -> None:
    """A replay of those updates needs it."""
    archive = Archive(tmp_path)
    run = await lived(archive, [("step", 1), ("checkpoint", 0), ("step", 2)])
    assert retention(run, run.checkpoints[0][0], {run.name(1)}).erase(FIRST_MS + SPREAD).erased == 1
    assert [one.forgotten for _, _, one in texts(archive)] == [True, False, False]


def test_a_damaged_step_is_named_and_the_others_are_done(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    run = DatedRun(archive, Streams())
    for _ in range(4):
        run.step(1)
    run.checkpoint()
    damaged = tmp_path / archive.steps()[1].file_name
    damaged.write_bytes(damaged.read_bytes()[:-3])
    looked = retention(run, run.checkpoints[-1][0])
    done = looked.erase(FIRST_MS + 99)
    assert done.erased == 3
    assert damaged.name in done.problem
    assert looked.erase(FIRST_MS + 99).problem == done.problem
    damaged.unlink()
    assert looked.erase(FIRST_MS + 99) == dataclasses.replace(done, erased=0, problem="")


async def test_what_the_next_start_may_train_again_stays_where_every_checkpoint_was_damaged(tmp_path: Path) -> None:
    """The second life began anew: what the folder of the damaged one says is no state that it came by."""
    archive = Archive(tmp_path)
    run = await lived(archive, [("step", 1)] * 4)
    run.checkpoint()
    damaged = run.checkpoints[-1][0]
    await run.restart(1)
    run.step(1)
    assert retention(run, damaged).erase(FIRST_MS + SPREAD) == Pass()
    assert not [one for _, _, one in texts(archive) if one.forgotten]
    run.checkpoint()
    assert retention(run, damaged).erase(FIRST_MS + SPREAD) == Pass(), "it is the oldest still"
    assert retention(run, run.checkpoints[-1][0]).erase(FIRST_MS + SPREAD).erased > 0


def test_a_checkpoint_that_cannot_be_read_now_is_none_that_is_gone(tmp_path: Path) -> None:
    """A later start may read it, and would train what came after it again."""
    kept = CheckpointStore(tmp_path, "unit", 2, 0, 0)
    for update in (2, 4):
        kept.save(fresh_progress("unit").model_copy(update={"update": update}), lambda _: None)
    oldest = tmp_path / "update-00000002" / "progress.json"
    oldest.unlink()
    assert (found := kept.oldest_progress()) is not None
    assert found.update == 4
    oldest.mkdir()
    with pytest.raises(IsADirectoryError):
        kept.oldest_progress()


def test_a_step_that_cannot_be_written_is_named_and_the_others_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = DatedRun(Archive(tmp_path))
    for _ in range(4):
        run.step(1)
    run.checkpoint()
    refusing, forget_in = run.archive.steps()[0], run.archive.forget_in

    def refuse(step: StepName, ids: Collection[str]) -> int:
        if step == refusing:
            raise PermissionError(13, "Permission denied", step.file_name)
        return forget_in(step, ids)

    monkeypatch.setattr(run.archive, "forget_in", refuse)
    done = retention(run, run.checkpoints[-1][0]).erase(FIRST_MS + SPREAD)
    assert (done.erased, refusing.file_name in done.problem) == (3, True)


async def test_a_pass_asks_once_what_may_be_trained_again_though_that_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Archive(tmp_path)
    run = await lived(archive, [*[("step", 1)] * 5, ("restart", 0), *[("step", 1)] * 5, ("checkpoint", 0)])
    asked = 0

    def offered(*_: object) -> dict[StepName, set[str]]:
        nonlocal asked
        asked += 1
        message = "update-00000001-epoch-0001.pb is damaged"
        raise ArchiveError(message)

    monkeypatch.setattr(retention_module, "offered_again", offered)
    done = retention(run, run.checkpoints[-1][0]).erase(FIRST_MS + SPREAD)
    assert (done, asked) == (Pass(5, "update-00000001-epoch-0001.pb is damaged"), 1)
    assert {step.epoch for step, _, one in texts(archive) if one.forgotten} == {2}


def test_a_pass_over_an_archive_that_was_seen_is_linear_in_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred thousand updates are no more than a long run has."""
    run = DatedRun(Archive(tmp_path))
    for _ in range(40):
        run.step(1)
    run.checkpoint()
    looked = retention(run, run.checkpoints[-1][0])
    looked.erase(FIRST_MS)
    hashed, own = 0, StepName.__hash__

    def counted(step: StepName) -> int:
        nonlocal hashed
        hashed += 1
        return own(step)

    monkeypatch.setattr(StepName, "__hash__", counted)
    looked.erase(FIRST_MS)
    assert hashed <= 10 * 40


def test_what_a_killed_process_left_half_written_goes_too(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    run = DatedRun(archive, Streams())
    run.step(1)
    run.checkpoint()
    torn = tmp_path / ".update-00000009-epoch-0001.pb.tmp"
    torn.write_bytes(b"what was written")
    floor = run.checkpoints[-1][0]
    assert retention(run, floor).erase(int(time.time() * 1000) + 9_999).erased == 1, "somebody may write it now"
    assert torn.exists()
    os.utime(torn, (1, 1))
    assert retention(run, floor).erase(FIRST_MS).erased == 1
    assert not torn.exists()


async def deliver(world: World, count: int, *, hours: float) -> None:
    """New trajectories that began so long ago."""
    for _ in range(count):
        message = random_trajectory(world.rng, world.config.run.name)
        message.id = uuid7(int((time.time() - hours * 3600) * 1000))
        await world.deliver(message)


async def test_a_trainer_forgets_while_it_trains_and_goes_back_to_any_kept_checkpoint(
    new_world: NewWorld, tiny_checkpoints: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The time is two seconds, and everything that comes is older: only the checkpoints hold text back."""
    model = f'model.path="{tiny_checkpoints[0]}"'
    often = "checkpoint.every_updates=1", "checkpoint.keep_every=0", "trainer.publish_every=50"
    world = new_world(model, *often, "retention.archive_h=0.0005")
    archive = Archive(world.config.run.dir / "archive")

    def forgotten() -> set[int]:
        return {update.update for _, update, one in texts(archive) if one.forgotten}

    trainer = await world.start()
    checkpoints = trainer.parts.checkpoints
    before = metrics.RETENTION_ERASED.labels("archive")._value.get()
    looking = app.retention_of(world.config, archive, checkpoints, fresh_progress("unit"), trainer.parts.epoch)
    async with looking.beside():
        running = asyncio.ensure_future(trainer.run())
        await deliver(world, 12, hours=2)
        await eventually(lambda: len(rows(world)) == 6, what="six updates", timeout_s=60)
        await eventually(lambda: 4 in forgotten(), what="the text below the oldest checkpoint to go", poll_s=0.05)
        await deliver(world, 2, hours=2)
        await eventually(lambda: len(rows(world)) == 7, what="one more update", timeout_s=60)
        trainer.stop.set()
        await running
    await looking.once()
    floor = checkpoints.updates()[0]
    assert forgotten() == set(range(1, floor + 1))
    assert metrics.RETENTION_ERASED.labels("archive")._value.get() == before + 2 * floor

    recent = [str(update) for update in range(floor + 1, 8)]
    assert replay([str(world.config.run.dir), *recent]) == 0
    assert replay([str(world.config.run.dir), str(floor)]) == 2
    assert "is forgotten: text was erased" in capsys.readouterr().err.replace("\n", " ")

    for update in checkpoints.updates()[1:]:
        (checkpoints.root / f"update-{update:08d}" / "progress.json").write_text("torn")
    second = await world.start()
    await second.run_updates(7 - floor)
    assert second.parts.consumer.dropped == {}
    trained = [one.id for row in rows(world) for one in row.trajectories if row.trainer_epoch == 1]
    assert [one.id for row in rows(world) for one in row.trajectories if row.trainer_epoch == 2] == trained[2 * floor :]
