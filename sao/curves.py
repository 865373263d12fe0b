"""Pure arithmetic over `updates.jsonl`: which rows count, and the curves that people look at."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from sao.preference import Preference
from sao.rows import TrainedRow, UpdateRow

WINDOW = 100
"""Trajectories in the moving average; its first value is at this trajectory."""


class CurvePoint(BaseModel):
    """The reward after one trajectory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trajectory: int
    """Counting from 1."""
    update: int
    wall_s: float
    """Seconds since the run's first trajectory was consumed."""
    reward: float
    moving_average: float
    """Mean of the last WINDOW rewards."""


RECOVERY_WINDOW, RECOVERED = 50, 0.8
"""Trajectories over which a reward's level is a mean, and the share of the level before a switch that is recovery."""


class Adaptation(BaseModel):
    """How the run followed one preference; seconds count from its PUT, none: it did not come to that."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int
    name: str
    stored_s: float
    """Unix seconds of the PUT."""
    first_scored_s: float | None
    """Until the scoring of a trajectory under it began; of those that were trained on."""
    first_trained_s: float | None
    """Until the end of the first update with a trajectory trained under it."""
    first_served_s: float | None
    """Until an engine was verified to serve the first version with that update in it."""
    recovered_s: float | None
    """Until the mean of RECOVERY_WINDOW rewards under it is at least RECOVERED of the level before it."""
    recovered_updates: int | None
    """The same in policy updates."""
    level_before: float | None
    """Mean of the last RECOVERY_WINDOW rewards before it; none: there were fewer, or it was not above 0."""


class PreferenceSwitch(BaseModel):
    """The first trajectory trained that was scored under another preference than the one before it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    from_version: int
    to_version: int
    trajectory: int
    update: int
    wall_s: float


def effective_rows(rows: Iterable[UpdateRow]) -> list[UpdateRow]:
    """The rows that made the present weights.

    After a fall back to an older checkpoint the trainer's next epoch does some updates again: the older epochs'
    rows from that point on are history.
    """
    kept: list[UpdateRow] = []
    for row in rows:
        if kept and row.trainer_epoch > kept[-1].trainer_epoch:
            kept = [old for old in kept if old.position < row.position]
        kept.append(row)
    return kept


def trained(rows: Iterable[UpdateRow]) -> list[tuple[UpdateRow, TrainedRow]]:
    """Every trajectory with its update, in training order."""
    return [(row, trajectory) for row in rows for trajectory in row.trajectories]


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Means of each `window` consecutive values; len(values) - window + 1 of them, none when there are too few."""
    if window < 1:
        msg = f"window {window}: at least 1"
        raise ValueError(msg)
    sums = [0.0, *accumulate(values)]
    return [(sums[i] - sums[i - window]) / window for i in range(window, len(values) + 1)]


def reward_curve(rows: Sequence[UpdateRow], window: int = WINDOW) -> list[CurvePoint]:
    """One point for each trajectory from number `window` on."""
    pairs = trained(rows)
    if not pairs:
        return []
    start_s = first_consumed_s(rows)
    averages = moving_average([trajectory.reward for _, trajectory in pairs], window)
    return [
        CurvePoint(
            trajectory=number,
            update=pairs[number - 1][0].update,
            wall_s=pairs[number - 1][1].consumed_s - start_s,
            reward=pairs[number - 1][1].reward,
            moving_average=average,
        )
        for number, average in enumerate(averages, start=window)
    ]


def first_consumed_s(rows: Sequence[UpdateRow]) -> float:
    """Unix seconds at which the first trajectory was taken; ValueError when none was."""
    return min(trajectory.consumed_s for _, trajectory in trained(rows))


def preference_switches(rows: Sequence[UpdateRow]) -> list[PreferenceSwitch]:
    """Where `scored_under` rises to a version not seen before; stragglers scored earlier do not switch back."""
    switches = []
    current: int | None = None
    for number, (row, trajectory) in enumerate(trained(rows), start=1):
        if current is not None and trajectory.scored_under > current:
            switches.append(
                PreferenceSwitch(
                    from_version=current,
                    to_version=trajectory.scored_under,
                    trajectory=number,
                    update=row.update,
                    wall_s=trajectory.consumed_s - first_consumed_s(rows),
                )
            )
        current = trajectory.scored_under if current is None else max(current, trajectory.scored_under)
    return switches


class Recovery:
    """Follows the rewards in training order, and tells when the level of before a switch is back."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECOVERY_WINDOW)
        self._since: deque[float] = deque(maxlen=RECOVERY_WINDOW)
        self._version: int | None = None
        self.level: float | None = None
        """Before the switch that is being followed."""
        self._recovered = True

    def observe(self, reward: float, trained_under: int) -> bool:
        """Take in the next trajectory's; whether its preference has recovered with it."""
        if self._version is not None and trained_under > self._version:
            level = fmean(self._recent) if len(self._recent) == RECOVERY_WINDOW else 0.0
            self.level = level if level > 0 else None
            self._since.clear()
            self._recovered = self.level is None
        self._version = max(self._version or trained_under, trained_under)
        self._recent.append(reward)
        if trained_under == self._version:
            self._since.append(reward)
        full = len(self._since) == RECOVERY_WINDOW
        if self._recovered or self.level is None or not full or fmean(self._since) < RECOVERED * self.level:
            return False
        self._recovered = True
        return True


@dataclass
class _Course:
    """How the reward went under one preference."""

    update_before: int
    level: float | None
    recovered: UpdateRow | None = None


def adaptations(
    rows: Sequence[UpdateRow], preferences: Sequence[Preference], served: Mapping[str, float]
) -> list[Adaptation]:
    """One for each preference but the first whose time is known; `served`: Unix seconds by version."""
    recovery, courses = Recovery(), dict[int, _Course]()
    for row, trajectory in trained(rows):
        back = recovery.observe(trajectory.reward, trajectory.trained_under)
        newest = max(courses, default=0)
        if trajectory.trained_under > newest:
            newest = trajectory.trained_under
            courses[newest] = _Course(row.update - (not row.critic_only), recovery.level)
        if back:
            courses[newest].recovered = row
    return [
        _adaptation(one, rows, served, courses.get(one.version, _Course(0, None)))
        for one in sorted(preferences, key=lambda preference: preference.version)[1:]
        if one.stored_s > 0
    ]


def _adaptation(
    preference: Preference, rows: Sequence[UpdateRow], served: Mapping[str, float], course: _Course
) -> Adaptation:
    version, recovered = preference.version, course.recovered
    scored = [one.scoring_started_s for _, one in trained(rows) if one.scored_under == version]
    after = [n for n, row in enumerate(rows) if any(one.trained_under == version for one in row.trajectories)]
    serving = [served[row.version] for row in rows[after[0] :] if row.version in served] if after else []

    def since(at_s: float | None) -> float | None:
        return None if at_s is None else max(at_s - preference.stored_s, 0.0)

    return Adaptation(
        version=version,
        name=preference.document.name,
        stored_s=preference.stored_s,
        first_scored_s=since(min(scored, default=None)),
        first_trained_s=since(rows[after[0]].finished_s if after else None),
        first_served_s=since(min(serving, default=None)),
        recovered_s=since(recovered.finished_s if recovered is not None else None),
        recovered_updates=recovered.update - course.update_before if recovered is not None else None,
        level_before=course.level,
    )


def lag_histogram(rows: Sequence[UpdateRow]) -> dict[int, int]:
    """Trajectories by lag, in updates, lowest first."""
    return dict(sorted(Counter(trajectory.lag for _, trajectory in trained(rows)).items()))


def dropped(rows: Iterable[UpdateRow]) -> dict[str, int]:
    """Trajectories dropped since the run began, by reason.

    Each row carries the count since the run began; a trainer that restarts may count from 0 again.
    """
    total: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for row in rows:
        for reason, count in row.dropped.items():
            total[reason] += count - seen[reason] if count >= seen[reason] else count
        seen = Counter(row.dropped)
    return dict(sorted(total.items()))


def rejected_share(row: UpdateRow) -> float | None:
    """Share of the update's action tokens that carried no policy gradient; none: the trainer did not say."""
    accepted = row.metrics.get("dis_accepted_fraction")
    return None if accepted is None else 1.0 - accepted


def explained_variance(row: UpdateRow) -> float | None:
    """Of the critic over the trainer's window; none while it is undefined."""
    return row.metrics.get("explained_variance")
