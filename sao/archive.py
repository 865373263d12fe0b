"""The archive: every optimiser step of a run as it happened, one file each, durable before anything is acknowledged.

- A file is whole or absent, and changes once at most for each of its trajectories: when its text is erased (`forget`,
  or `forget_in` when its time is over).
- `update-UUUUUUUU-epoch-EEEE.pb` holds one step. Several steps may end at the same update number in one epoch (the
  critic's warm-up moves no policy): the later ones get `-step-SSSS` appended, counting from 2.
- `epoch-EEEE.toml` is the run file that the steps of one epoch were made under.
- After a fall-back to an older checkpoint the same update is made again under a higher trainer epoch; `read` gives
  the newest epoch's, the older one stays until it is pruned.
- One process writes and prunes (the trainer's epoch fences it); any number read.
- `forgotten/ID` says that the text of a trajectory is erased (`forget`). It is written before any file is looked
  through, and looked for after any file is written, so no step keeps a text that was to go, whoever comes first.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from sao.atomic import TEMPORARY_SUFFIX, make_directory, write_file
from sao.v1 import archive_pb2 as pb

_NAME = re.compile(r"update-(\d{8,})-epoch-(\d{4,})(?:-step-(\d{4,}))?\.pb")
_RUN_FILE = re.compile(r"epoch-(\d{4,})\.toml")


_LOCK_FILE = ".lock"
_LOCK_TIMEOUT_S = 30.0
_KEPT = frozenset(
    {
        "id",
        "run",
        "task",
        "ordinal",
        "sample",
        "attempt",
        "sampling",
        "finish_reason",
        "engine_id",
        "worker_id",
        "turns",
    }
)
"""Fields of a trajectory that are no text; of its segments kinds, log-probs and versions stay."""


class ArchiveError(Exception):
    """An archived update cannot be read: names the file and what is wrong with it."""


class NotArchivedError(ArchiveError, KeyError):
    """There is no step of this update in the archive."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True, order=True)
class StepName:
    """Which step a file holds; sorts by update, then epoch, then order within both."""

    update: int
    epoch: int
    step: int

    @property
    def file_name(self) -> str:
        suffix = f"-step-{self.step:04d}" if self.step > 1 else ""
        return f"update-{self.update:08d}-epoch-{self.epoch:04d}{suffix}.pb"


class Archive:
    """The archive in one directory, which is created when missing."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def append(self, update: pb.ArchivedUpdate) -> Path:
        """Write one step, durable on return; where it lies. An earlier step is never overwritten."""
        step = 1
        while (path := self._directory / StepName(update.update, update.trainer_epoch, step).file_name).exists():
            step += 1
        write_file(path, update.SerializeToString())
        if gone := {one.trajectory.id for one in update.trajectories if self.forgotten(one.trajectory.id)}:
            self._rewrite(path, gone)
        return path

    def forgotten(self, trajectory_id: str) -> bool:
        """Whether the text of this trajectory is to be nowhere in the archive."""
        return (self._tombs / trajectory_id).exists()

    def forget(self, trajectory_id: str) -> int:
        """Erase its text from every step, now and whenever one of it is written; in how many there was any.

        Numbers stay. Safe while a trainer works here. ArchiveError for a damaged file, which may hold it, and for one
        that somebody is writing.
        """
        make_directory(self._tombs)
        write_file(self._tombs / trajectory_id, b"")
        name = trajectory_id.encode()
        found = 0
        for step in self.steps():
            path = self._directory / step.file_name
            with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
                found += name in path.read_bytes() and self._rewrite(path, {trajectory_id}) > 0
        return found + self._remove_torn(name)

    def forget_in(self, step: StepName, trajectory_ids: Collection[str]) -> int:
        """Erase the texts of these trajectories from one step, where nobody writes them any more; how many there were.

        Unlike `forget` it keeps nothing from being written later. ArchiveError as there.
        """
        make_directory(self._tombs)  # what asks whether anything was ever forgotten looks for it
        try:
            return self._rewrite(self._directory / step.file_name, trajectory_ids)
        except FileNotFoundError:
            return 0  # pruned meanwhile

    def remove_torn_before(self, unix_s: float) -> int:
        """Remove what killed processes have left half-written before this time; how many."""
        removed = 0
        for path in self._temporaries():
            with contextlib.suppress(FileNotFoundError):  # finished meanwhile
                if path.stat().st_mtime < min(unix_s, time.time() - _LOCK_TIMEOUT_S):
                    path.unlink()
                    removed += 1
        return removed

    def trained(self, trajectory_id: str) -> Iterator[pb.TrainedTrajectory]:
        """Every training on it that is archived, superseded ones too; ArchiveError at a damaged step that names it."""
        for step in self.steps():
            path = self._directory / step.file_name
            with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
                if trajectory_id.encode() in path.read_bytes():
                    yield from (one for one in self.load(step).trajectories if one.trajectory.id == trajectory_id)

    def forgotten_steps(self) -> set[StepName]:
        """Steps that lack the text of a trajectory; no file is opened when nothing was ever forgotten."""
        if not self._tombs.is_dir():
            return set()
        return {step for step in self.steps() if any(one.forgotten for one in self.load(step).trajectories)}

    def finish_forgetting(self) -> None:
        """Do what a trainer that was killed between writing its last step and looking at `forgotten` has left."""
        if self._tombs.is_dir() and (steps := self.steps()):
            newest = max(steps, key=lambda step: (step.epoch, step.update, step.step))
            self._rewrite(self._directory / newest.file_name, {path.name for path in self._tombs.iterdir()})

    @property
    def _tombs(self) -> Path:
        return self._directory / "forgotten"

    def _rewrite(self, path: Path, ids: Collection[str]) -> int:
        """Erase the texts of these trajectories from one step; how many there were."""
        with self._rewriting():
            try:
                update = pb.ArchivedUpdate.FromString(path.read_bytes())
            except DecodeError as error:
                msg = f"{path} is damaged: {error}; it may hold text that is to be erased: restore or remove it"
                raise ArchiveError(msg) from error
            texts = [one for one in update.trajectories if one.trajectory.id in ids and not one.forgotten]
            for one in texts:
                erase_text(one)
            if texts:
                write_file(path, update.SerializeToString())
        return len(texts)

    def _remove_torn(self, name: bytes) -> int:
        """Remove what a killed trainer has left of files with this id in them; how many."""
        removed = 0
        for path in self._temporaries():
            with contextlib.suppress(FileNotFoundError):  # finished meanwhile
                if name in path.read_bytes():
                    if time.time() - path.stat().st_mtime < _LOCK_TIMEOUT_S:
                        msg = f"{path} is being written with text that is to be erased; try again in a minute"
                        raise ArchiveError(msg)
                    path.unlink()
                    removed += 1
        return removed

    def _temporaries(self) -> Iterator[Path]:
        return self._directory.glob(f".update-*{TEMPORARY_SUFFIX}")

    @contextlib.contextmanager
    def _rewriting(self) -> Iterator[None]:
        """Be the only one who changes or removes files that are there; ArchiveError when another does for too long."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        with (self._directory / _LOCK_FILE).open("a", encoding="utf-8") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        msg = f"{self._directory} is being changed by another process for {_LOCK_TIMEOUT_S:g} s"
                        raise ArchiveError(msg) from error
                    time.sleep(0.02)
            yield

    def write_run_file(self, epoch: int, text: str) -> None:
        """Keep the run file that this trainer epoch works under, durable on return."""
        write_file(self.run_file(epoch), text.encode())

    def newest_epoch(self) -> int:
        """The highest trainer epoch that has begun to work, whether it made a step or not; 0: none."""
        matches = (_RUN_FILE.fullmatch(path.name) for path in self._directory.iterdir())
        return max([*(int(match[1]) for match in matches if match), *(step.epoch for step in self.steps())], default=0)

    def run_file(self, epoch: int) -> Path:
        """Where the run file of this epoch is kept; an earlier release wrote none."""
        return self._directory / f"epoch-{epoch:04d}.toml"

    def read(self, update: int) -> pb.ArchivedUpdate:
        """The last step that ended at this update, of the newest epoch; NotArchivedError when there is none."""
        return self.load(self._steps_of(update)[-1])

    def read_steps(self, update: int) -> list[pb.ArchivedUpdate]:
        """Every step that ended at this update in its newest epoch, in order; NotArchivedError when there is none."""
        steps = self._steps_of(update)
        return [self.load(step) for step in steps if step.epoch == steps[-1].epoch]

    def read_history(self, update: int) -> list[pb.ArchivedUpdate]:
        """Every step that ever ended at this update, superseded epochs first; NotArchivedError when there is none."""
        return [self.load(step) for step in self._steps_of(update)]

    def steps(self) -> list[StepName]:
        """Every step that is archived, abandoned epochs among them, in the order of `StepName`; no file is opened.

        What an abandoned epoch trained on may still wait to be trained again, so recovery begins here.
        """
        matches = (_NAME.fullmatch(path.name) for path in self._directory.iterdir())
        return sorted(StepName(int(m[1]), int(m[2]), int(m[3] or 1)) for m in matches if m)

    def load(self, step: StepName) -> pb.ArchivedUpdate:
        """The step of this name; ArchiveError when its file is damaged or holds another one."""
        path = self._directory / step.file_name
        try:
            found = pb.ArchivedUpdate.FromString(path.read_bytes())
        except DecodeError as error:
            msg = f"{path} is damaged: {error}; restore it from a copy or prune it"
            raise ArchiveError(msg) from error
        if (found.update, found.trainer_epoch) != (step.update, step.epoch):
            msg = f"{path} holds update {found.update} of epoch {found.trainer_epoch}: restore the file of its name"
            raise ArchiveError(msg)
        return found

    def updates(self) -> list[int]:
        """The update numbers that are archived, ascending, each once."""
        return sorted({step.update for step in self.steps()})

    def prune(self, below: int) -> list[int]:
        """Remove every step of the updates below this number, all epochs; the numbers removed."""
        with self._rewriting():
            for temporary in self._temporaries():
                temporary.unlink()  # left by a crash: only this process writes
            doomed = [step for step in self.steps() if step.update < below]
            for step in doomed:
                (self._directory / step.file_name).unlink()
        return sorted({step.update for step in doomed})

    def _steps_of(self, update: int) -> list[StepName]:
        steps = [step for step in self.steps() if step.update == update]
        if not steps:
            known = self.updates()
            span = f"it holds updates {known[0]} to {known[-1]}" if known else "it is empty"
            msg = f"update {update} is not in the archive {self._directory}: {span}"
            raise NotArchivedError(msg)
        return steps


def erase_text(trained: pb.TrainedTrajectory) -> None:
    """Leave nothing of a trained trajectory but ids and numbers, in place; `forgotten` says so from now on."""
    message = trained.trajectory
    for field, _ in message.ListFields():
        if field.name == "segments":
            for segment in message.segments:
                del segment.token_ids[:]
        elif field.name not in _KEPT:
            message.ClearField(field.name)  # type: ignore[arg-type]  # any field's name
    trained.routed_experts = b""
    trained.forgotten = True
