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


SERVED_WITHIN = 64
"""Versions from the first trained update on among which the first served one is looked for; long before as many have
been published without an engine, what they sampled is too old to train."""


@dataclass
class _Course:
    """How the run went under one preference."""

    scored_s: float | None = None
    trained_s: float | None = None
    published: int = 0
    """Versions that it has a part in, at most SERVED_WITHIN."""
    served_s: float | None = None
    update_before: int = 0
    level: float | None = None
    recovered_s: float | None = None
    recovered_updates: int | None = None


class Courses:
    """Follows the rows that count, in their order, and the servings in any; memory grows with preferences alone."""

    def __init__(self) -> None:
        self._recovery = Recovery()
        self._of: dict[int, _Course] = {}
        self._newest = 0
        """Newest preference that was trained under."""
        self._unserved: list[_Course] = []
        """Those whose versions are still being counted."""
        self._parts: dict[str, list[_Course]] = {}
        """Who has a part in a version, for those counted."""
        self._served: dict[str, float] = {}
        """The newest ones, each with its first moment: a version may serve before its row is read."""

    def take(self, row: UpdateRow) -> None:
        """The next row."""
        for one in row.trajectories:
            scored = self._course(one.scored_under)
            scored.scored_s = _least(scored.scored_s, one.scoring_started_s)
            course = self._course(one.trained_under)
            if course.trained_s is None:
                course.trained_s = row.finished_s
                self._unserved.append(course)
            back = self._recovery.observe(one.reward, one.trained_under)
            if one.trained_under > self._newest:
                self._newest = one.trained_under
                course.update_before = row.update - (not row.critic_only)
                course.level = self._recovery.level
            if back:
                newest = self._of[self._newest]
                newest.recovered_s, newest.recovered_updates = row.finished_s, row.update - newest.update_before
        if row.version and self._unserved:
            self._parts[row.version] = list(self._unserved)
            for course in self._unserved:
                course.published += 1
                course.served_s = _least(course.served_s, self._served.get(row.version))
            self._unserved = [course for course in self._unserved if course.published < SERVED_WITHIN]

    def serve(self, version: str, at_s: float) -> None:
        """An engine was verified to serve this version at this Unix time."""
        self._served[version] = min(self._served.get(version, at_s), at_s)
        while len(self._served) > SERVED_WITHIN:
            del self._served[next(iter(self._served))]
        for course in self._parts.get(version, []):
            course.served_s = _least(course.served_s, at_s)

    def adaptation(self, preference: Preference) -> Adaptation:
        """How the run has followed this one, up to now."""
        course = self._of.get(preference.version, _Course())

        def since(at_s: float | None) -> float | None:
            return None if at_s is None else max(at_s - preference.stored_s, 0.0)

        return Adaptation(
            version=preference.version,
            name=preference.document.name,
            stored_s=preference.stored_s,
            first_scored_s=since(course.scored_s),
            first_trained_s=since(course.trained_s),
            first_served_s=since(course.served_s),
            recovered_s=since(course.recovered_s),
            recovered_updates=course.recovered_updates,
            level_before=course.level,
        )

    def _course(self, version: int) -> _Course:
        return self._of.setdefault(version, _Course())


def _least(known: float | None, found: float | None) -> float | None:
    return min((one for one in (known, found) if one is not None), default=None)


def adaptations(
    rows: Sequence[UpdateRow], preferences: Sequence[Preference], served: Mapping[str, float]
) -> list[Adaptation]:
    """One for each preference but the first whose time is known; `served`: Unix seconds by version."""
    courses = Courses()
    for row in rows:
        courses.take(row)
    for version, at_s in served.items():
        courses.serve(version, at_s)
    ascending = sorted(preferences, key=lambda preference: preference.version)
    return [courses.adaptation(one) for one in ascending[1:] if one.stored_s > 0]


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
