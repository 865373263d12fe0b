"""curves.png: four small pictures of a run, drawn without a screen (needs matplotlib, the extra `report`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from sao.curves import explained_variance, moving_average, preference_switches, rejected_share, trained
from sao.rows import UpdateRow

BLUE, GREY, RED = "#1f5fa8", "#9a9a9a", "#b3261e"


def draw_curves(rows: Sequence[UpdateRow], file: Path, *, title: str, window: int) -> None:
    """Reward, lag, rejected share and explained variance over trajectories; the file appears whole."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    figure.suptitle(title)
    _reward(axes[0][0], rows, window)
    _lag(axes[0][1], rows)
    _metric(axes[1][0], rows, rejected_share, "share of action tokens without gradient (rejected or stale)")
    _metric(axes[1][1], rows, explained_variance, "explained variance of the critic")
    for axis in (axes[0][0], axes[0][1], axes[1][0], axes[1][1]):
        axis.set_xlabel("trajectories")
        axis.grid(visible=True, alpha=0.25)
        for switch in preference_switches(rows):
            axis.axvline(switch.trajectory, color=RED, linewidth=1, linestyle="--")
    temporary = file.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=120)
    plt.close(figure)
    temporary.replace(file)


def _reward(axis: Axes, rows: Sequence[UpdateRow], window: int) -> None:
    rewards = [trajectory.reward for _, trajectory in trained(rows)]
    axis.plot(range(1, len(rewards) + 1), rewards, ".", color=GREY, markersize=2, alpha=0.5, label="one trajectory")
    averages = moving_average(rewards, window)
    if averages:
        axis.plot(range(window, len(rewards) + 1), averages, color=BLUE, label=f"mean of the last {window}")
    axis.set_title("reward (dashed: the preference was switched)")
    axis.legend(loc="lower right", fontsize=8)


def _lag(axis: Axes, rows: Sequence[UpdateRow]) -> None:
    number, lags = 0, []
    for row in rows:
        number += len(row.trajectories)
        values = [trajectory.lag for trajectory in row.trajectories]
        if values:
            lags.append((number, sum(values) / len(values), max(values)))
    axis.plot([at for at, _, _ in lags], [mean for _, mean, _ in lags], color=BLUE, linewidth=1, label="mean")
    axis.plot([at for at, _, _ in lags], [most for _, _, most in lags], ".", color=GREY, markersize=2, label="max")
    axis.set_title("lag of an update's trajectories, in updates")
    axis.legend(loc="upper left", fontsize=8)


def _metric(axis: Axes, rows: Sequence[UpdateRow], of: Callable[[UpdateRow], float | None], title: str) -> None:
    number, points = 0, []
    for row in rows:
        number += len(row.trajectories)
        value = of(row)
        if value is not None:
            points.append((number, value))
    axis.plot([at for at, _ in points], [value for _, value in points], color=BLUE, linewidth=1)
    axis.set_title(title)
