"""One picture of several runs' reward curves, drawn without a screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from sao.curves import WINDOW


def draw_comparison(
    curves: Mapping[str, Sequence[Sequence[float]]], file: Path, *, title: str, marks: Sequence[int] = ()
) -> None:
    """A line of (trajectory, mean of the last WINDOW rewards) for each run; the file appears whole.

    With `marks` the curves run over policy updates, and these are marked. Runs whose names differ only in the seed
    share a colour.
    """
    figure, axis = plt.subplots(figsize=(10, 5.5), constrained_layout=True)
    axis.set_title("\n".join(wrap(title, 110)), fontsize=9)
    kinds = list(dict.fromkeys(name.rpartition("-")[0] for name in curves))
    styles: dict[str, int] = dict.fromkeys(kinds, 0)
    for name, points in curves.items():
        kind = name.rpartition("-")[0]
        colour, dashes = f"C{kinds.index(kind)}", ("-", "--", ":", "-.")[styles[kind] % 4]
        styles[kind] += 1
        axis.plot([at for at, _ in points], [mean for _, mean in points], dashes, c=colour, linewidth=1.3, label=name)
    for mark in marks:
        axis.axvline(mark, color="grey", linewidth=1, linestyle="--")
    axis.set_xlabel("policy updates" if marks else "trajectories")
    axis.set_ylabel(f"mean of the last {WINDOW} rewards")
    axis.set_ylim(0, 1)
    axis.grid(visible=True, alpha=0.25)
    axis.legend(loc="lower right", fontsize=8)
    temporary = file.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=120)
    plt.close(figure)
    temporary.replace(file)
