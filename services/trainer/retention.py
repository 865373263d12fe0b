"""Erases archived text that is over its time, but none that a fall-back to a kept checkpoint would train again.

Numbers and ids stay, as with `sao forget`. The oldest checkpoint that is kept is the farthest back that a start can go:

| archived step | its text |
|---|---|
| that checkpoint holds it | goes when its trajectory is over its time |
| beyond that checkpoint | stays, whatever its time |
| before it, of an abandoned epoch | goes when over its time, but for what a start from there would train again |

Without any checkpoint all of it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from sao.archive import Archive, ArchiveError, StepName
from sao.ids import uuid7_unix_ms
from sao.retention import Pass
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
        self, archive: Archive, checkpoints: CheckpointStore, let_go: Callable[[], Collection[str]] = frozenset
    ) -> None:
        """`let_go`: dropped, so that no start trains it again."""
        self._archive = archive
        self._checkpoints = checkpoints
        self._let_go = let_go
        self._seen: dict[StepName, _Seen] = {}

    def erase(self, before_ms: int) -> Pass:
        """One pass over what began before this Unix time; blocks."""
        floor = self._checkpoints.oldest_progress()
        if floor is None:
            return Pass()
        steps = self._archive.steps()
        self._seen = {step: seen for step, seen in self._seen.items() if step in set(steps)}
        erased, problems = self._archive.remove_torn_before(before_ms / 1000), list[str]()
        wanted: dict[StepName, set[str]] | None = None
        for step in steps:
            try:
                seen = self._look(step)
                due = {one for one, began_ms in seen.texts.items() if began_ms < before_ms}
                position = step.update, seen.critic_only
                if due and not floor.holds(step.epoch, *position):
                    if position > (floor.update, floor.critic_only):
                        continue
                    wanted = self._wanted(floor) if wanted is None else wanted
                    due = due.difference(*wanted.values())
                if due:
                    erased += self._archive.forget_in(step, due)
                    for one in due:
                        del seen.texts[one]
            except FileNotFoundError:
                continue  # pruned meanwhile
            except ArchiveError as error:
                problems.append(str(error))
        return Pass(erased, "; ".join(problems[:1]) + (f" (and {len(problems) - 1} more)" if problems[1:] else ""))

    def _wanted(self, floor: Progress) -> dict[StepName, set[str]]:
        return offered_again(self._archive, floor, self._let_go())

    def _look(self, step: StepName) -> _Seen:
        if (seen := self._seen.get(step)) is None:
            update = self._archive.load(step)
            texts = {one.trajectory.id: one for one in update.trajectories if not one.forgotten}
            critic_only = int(update.metrics[CRITIC_ONLY]) if step.update == 0 else 0
            seen = self._seen[step] = _Seen(critic_only, {one: uuid7_unix_ms(one) for one in texts})
        return seen
