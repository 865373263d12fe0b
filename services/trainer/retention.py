"""Erases archived text that is over its time, but none that a fall-back to a kept checkpoint would train again.

Numbers and ids stay, as with `sao forget`. The oldest checkpoint that is kept is the farthest back that a start can go:

| archived step | its text |
|---|---|
| that checkpoint holds it | goes when its trajectory is over its time |
| beyond that checkpoint | stays, whatever its time |
| before it, of an abandoned epoch | goes when over its time, but for what a start from there would train again |

Without any checkpoint all of it stays; also as long as the oldest is none that this process's state came by, where all
that were kept were damaged: the next start may begin as early as this one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from sao.archive import Archive, ArchiveError, StepName
from sao.ids import uuid7_unix_ms
from sao.retention import Pass, with_rest
from sao.rows import CRITIC_ONLY
from services.trainer.checkpoint import CheckpointStore, Progress
from services.trainer.recovery import offered_again


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one file said when it was opened."""

    critic_only: int
    texts: dict[str, int]
    """Unix milliseconds at which each trajectory began whose text is there."""


class ArchiveRetention:
    """Of one trainer process, which opens a file twice: to learn its age, and when something of it goes."""

    def __init__(
        self,
        archive: Archive,
        checkpoints: CheckpointStore,
        let_go: Callable[[], Collection[str]] = frozenset,
        *,
        begun: Progress,
        epoch: int,
    ) -> None:
        """`let_go`: dropped, so that no start trains it again; `begun`, `epoch`: where this process began, and its."""
        self._archive = archive
        self._checkpoints = checkpoints
        self._let_go = let_go
        self._begun = begun
        self._epoch = epoch
        self._seen: dict[StepName, _Seen] = {}

    def erase(self, before_ms: int) -> Pass:
        """One pass over what began before this Unix time; blocks."""
        floor = self._checkpoints.oldest_progress()
        if floor is None or not self._came_by(floor):
            return Pass()
        erased, problems = self._archive.remove_torn_before(before_ms / 1000), list[str]()
        for step, due in self._due(floor, before_ms, problems).items():
            try:
                erased += self._archive.forget_in(step, due)
            except (ArchiveError, OSError) as error:
                problems.append(str(error))
            else:
                for one in due:
                    del self._seen[step].texts[one]
        return Pass(erased, with_rest(problems))

    def _came_by(self, floor: Progress) -> bool:
        """Whether this process's state was once that: it is not where what is kept is damaged, or was abandoned."""
        made_by = floor.stretches[-1].trainer_epoch if floor.stretches else floor.trainer_epoch
        return made_by == self._epoch or self._begun.holds(made_by, floor.update, floor.critic_only)

    def _due(self, floor: Progress, before_ms: int, problems: list[str]) -> dict[StepName, set[str]]:
        """What may go now; what cannot be told goes to `problems` and stays."""
        steps = self._archive.steps()
        self._seen = {step: self._seen[step] for step in steps if step in self._seen}
        due, abandoned = dict[StepName, set[str]](), dict[StepName, set[str]]()
        for step in steps:
            try:
                seen = self._look(step)
            except FileNotFoundError:
                continue  # pruned meanwhile
            except (ArchiveError, OSError) as error:
                problems.append(str(error))
                continue
            over = {one for one, began_ms in seen.texts.items() if began_ms < before_ms}
            position = step.update, seen.critic_only
            if over and floor.holds(step.epoch, *position):
                due[step] = over
            elif over and position <= (floor.update, floor.critic_only):
                abandoned[step] = over
        if abandoned:
            try:
                wanted = set[str]().union(*offered_again(self._archive, floor, self._let_go()).values())
            except (ArchiveError, OSError) as error:
                problems.append(str(error))
            else:
                due |= {step: free for step, over in abandoned.items() if (free := over - wanted)}
        return due

    def _look(self, step: StepName) -> _Seen:
        if (seen := self._seen.get(step)) is None:
            update = self._archive.load(step)
            texts = {one.trajectory.id: one for one in update.trajectories if not one.forgotten}
            critic_only = int(update.metrics[CRITIC_ONLY]) if step.update == 0 else 0
            seen = self._seen[step] = _Seen(critic_only, {one: uuid7_unix_ms(one) for one in texts})
        return seen
