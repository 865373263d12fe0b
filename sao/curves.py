"""Pure arithmetic over `updates.jsonl`: which rows count, and the curves that people look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

from pydantic import BaseModel, ConfigDict

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
