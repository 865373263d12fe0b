"""The online preference: the rewarded style is switched twice while a run trains, and how well it follows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sao.curves import WINDOW, moving_average
from sao.rows import TrainedRow, UpdateRow

STYLES = ("cute", "chuunibyou", "classical")
SWITCHES = (150, 300)
"""Policy updates at which the style is switched to the next."""
RECOVER_WITHIN = 150
"""Updates in which the reward should be back ..."""
RECOVERED = 0.8
"""... at this share of its level before the switch."""
LEVEL_WINDOW = 50
"""Trajectories over which a level is a mean."""


def phases(rows: Sequence[TrainedRow]) -> list[list[float]]:
    """Rewards in the order trained, by the preference they were trained under, oldest preference first."""
    versions = sorted({row.trained_under for row in rows})
    return [[row.reward for row in rows if row.trained_under == version] for version in versions]


def followed(before: Sequence[float], after: Sequence[float], per_update: int) -> dict[str, Any]:
    """One switch: the level before it, right after it, and the updates until a level is RECOVERED of the first."""
    level = _mean(before[-LEVEL_WINDOW:])
    means = [_mean(after[i : i + LEVEL_WINDOW]) for i in range(len(after) - LEVEL_WINDOW + 1)]
    ends = next((i + LEVEL_WINDOW for i, value in enumerate(means) if value >= RECOVERED * level), None)
    updates = None if ends is None else -(-ends // per_update)
    return {
        "level_before": round(level, 4),
        "level_right_after": round(means[0], 4) if means else None,
        "recovered_after_updates": updates,
        "best_level_after": round(max(means), 4) if means else None,
        "followed": updates is not None and updates <= RECOVER_WITHIN,
    }


def curve(rows: Sequence[UpdateRow], points: int = 300) -> list[list[float]]:
    """(policy update, mean of the last WINDOW rewards), at most about so many points."""
    rewards = [trained.reward for row in rows for trained in row.trajectories]
    updates = [row.update for row in rows for _ in row.trajectories]
    averages = moving_average(rewards, WINDOW)
    drawn = list(zip(updates[WINDOW - 1 :], averages, strict=True))
    step = max(math.ceil(len(drawn) / points), 1)
    return [[update, round(value, 4)] for update, value in drawn[::step]]


def enough(cases: Mapping[str, Mapping[str, Any]], algorithm: str = "sao", least: int = 2) -> bool:
    """Whether at least so many runs of the algorithm followed both switches; the others are shown as they come."""
    followed_both = [name for name, case in cases.items() if name.rpartition("-")[0] == algorithm and case["passed"]]
    return len(followed_both) >= least


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
