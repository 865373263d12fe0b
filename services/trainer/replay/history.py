"""Which archived steps a replay re-applies, and from which state.

A run is a chain of steps, warm-up included, that begins at the initial model; checkpoints on that chain are where a
replay may begin. What a fall-back abandoned is not on it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from sao.archive import Archive
from sao.config import RunConfig, load_run_config
from services.trainer.checkpoint import Checkpoint, CheckpointStore
from services.trainer.recovery import ArchivedStep, effective_steps


class CannotReplayError(Exception):
    """What was asked for cannot be replayed: says why, and what can be."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps of a run and the state that they begin from."""

    start: Checkpoint | None
    """None: the initial model."""
    before: Sequence[ArchivedStep]
    """The steps that made this state, as far as they are archived."""
    steps: Sequence[ArchivedStep]

    @property
    def origin(self) -> str:
        """The state's name for people."""
        return self.start.path.name if self.start is not None else "initial model"


class ArchivedRun:
    """A run folder, read only."""

    def __init__(self, folder: Path) -> None:
        """CannotReplayError when there is no run, or nothing of it in the archive."""
        if not (folder / "archive").is_dir():
            made = "has no archive: the run has made no update yet"
            none = "holds no run: expected an archive, give the folder that --run-dir or run.dir named"
            msg = f"{folder} {made if (folder / 'run.toml').is_file() else none}"
            raise CannotReplayError(msg)
        self.folder = folder
        self.archive = Archive(folder / "archive")
        name = self.config(self.archive.newest_epoch()).run.name
        self._checkpoints = CheckpointStore(folder / "checkpoints", name, keep_last=1, keep_every=0, min_free_bytes=0)
        newest = self._checkpoints.newest()
        self.steps = effective_steps(self.archive, newest.progress if newest is not None else None)
        self._forgotten = self.archive.forgotten_steps()

    def config(self, epoch: int) -> RunConfig:
        """The run file that this trainer epoch worked under; the run's present one where none was kept."""
        kept, present = self.archive.run_file(epoch), self.folder / "run.toml"
        if not kept.exists() and not present.exists():
            msg = f"{self.folder} holds no run: expected run.toml, or archive/{kept.name}"
            raise CannotReplayError(msg)
        return load_run_config(kept if kept.exists() else present, env={})

    def plan(self, updates: Collection[int]) -> list[Stretch]:
        """The fewest steps that replay these updates, each stretch once, in order.

        CannotReplayError when one is not archived, or steps between it and the nearest state are missing.
        """
        missing = sorted(set(updates) - {step.name.update for step in self.steps})
        if missing:
            raise CannotReplayError(self._refusal(missing[0], "it is not in the run's archive"))
        wanted = [i for i, step in enumerate(self.steps) if step.name.update in updates]
        stretches: list[Stretch] = []
        for start, begin in self._starts():
            mine = [i for i in wanted if i >= begin]
            wanted = [i for i in wanted if i < begin]
            if mine:
                stretches.append(Stretch(start, self.steps[:begin], self.steps[begin : mine[-1] + 1]))
                self._require_unbroken(stretches[-1])
            if not wanted:
                break
        return stretches[::-1]

    def replayable(self) -> list[int]:
        """Every update that `plan` accepts, ascending."""
        able: set[int] = set()
        end = len(self.steps)
        for start, begin in self._starts():
            able |= {begin + i for i in range(len(self._unbroken(start, self.steps[begin:end])))}
            end = begin
        lacking = {step.name.update for i, step in enumerate(self.steps) if i not in able}
        return sorted({step.name.update for step in self.steps} - lacking)

    @property
    def able(self) -> str:
        """The same for people."""
        return spans(self.replayable()) or "none"

    def _starts(self) -> Iterator[tuple[Checkpoint | None, int]]:
        """Every state that a replay may begin from, newest first, with the index of the step after it."""
        positions = [step.position for step in self.steps]
        for checkpoint in self._checkpoints.whole():
            begin = bisect_right(positions, _position(checkpoint))
            held = (checkpoint.progress.holds(step.name.epoch, *step.position) for step in self.steps[:begin])
            if all(held):
                yield checkpoint, begin
        yield None, 0

    def _unbroken(self, start: Checkpoint | None, steps: Sequence[ArchivedStep]) -> Sequence[ArchivedStep]:
        """The longest beginning of these steps that leaves no step out and has all its text."""
        update, critic_only = _position(start)
        for i, step in enumerate(steps):
            warm_up_goes_on = update == 0 and step.position == (0, critic_only + 1)
            out = not warm_up_goes_on and step.position != (update + 1, 0)
            if out or step.name in self._forgotten:
                return steps[:i]
            update, critic_only = step.position
        return steps

    def _require_unbroken(self, stretch: Stretch) -> None:
        unbroken = self._unbroken(stretch.start, stretch.steps)
        if len(unbroken) < len(stretch.steps):
            hole = stretch.steps[len(unbroken)].name
            reason = f"the archive lacks a step before update {hole.update}, on the way from {stretch.origin}"
            if hole in self._forgotten:
                reason = (
                    f"update {hole.update}, on the way from {stretch.origin}, is forgotten: text was erased from it"
                )
            raise CannotReplayError(self._refusal(stretch.steps[-1].name.update, reason))

    def _refusal(self, update: int, reason: str) -> str:
        return f"update {update} cannot be replayed: {reason}; those that can: {self.able}"


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: `1-25, 30, 41-60`."""
    runs = [[n for _, n in group] for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _position(start: Checkpoint | None) -> tuple[int, int]:
    """Where a state stands, as `ArchivedStep.position` tells it."""
    if start is None:
        return 0, 0
    progress = start.progress
    return progress.update, progress.critic_only if progress.update == 0 else 0
