"""The archive: every optimiser step of a run as it happened, one file each, durable before anything is acknowledged.

- A file is whole or absent, and never changed once written.
- `update-UUUUUUUU-epoch-EEEE.pb` holds one step. Several steps may end at the same update number in one epoch (the
  critic's warm-up moves no policy): the later ones get `-step-SSSS` appended, counting from 2.
- `epoch-EEEE.toml` is the run file that the steps of one epoch were made under.
- After a fall-back to an older checkpoint the same update is made again under a higher trainer epoch; `read` gives
  the newest epoch's, the older one stays until it is pruned.
- One process writes and prunes (the trainer's epoch fences it); any number read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from sao.atomic import TEMPORARY_SUFFIX, write_file
from sao.v1 import archive_pb2 as pb

_NAME = re.compile(r"update-(\d{8,})-epoch-(\d{4,})(?:-step-(\d{4,}))?\.pb")
_RUN_FILE = re.compile(r"epoch-(\d{4,})\.toml")


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
        return path

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
        for temporary in self._directory.glob(f".update-*{TEMPORARY_SUFFIX}"):
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
