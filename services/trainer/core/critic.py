"""How good the critic is: explained variance, over one set of tokens or over a running window of trajectories.

Letters: N action tokens of any number of trajectories.
"""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """EV = 1 - Var(R - V) / Var(R) over action tokens; NaN when Var(R) is 0."""
    values, returns = values_N.double(), returns_N.double()
    # Compared, not computed: the mean of equal numbers may be rounded, and their variance is then 1e-33.
    if bool((returns == returns[:1]).all()):
        return math.nan
    return 1.0 - float((returns - values).var(correction=0) / returns.var(correction=0))


class ValueWindow:
    """The values and returns of the newest trajectories: within one trajectory R is constant and EV undefined."""

    def __init__(self, trajectories: int) -> None:
        self._pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=trajectories)

    def append(self, values_A: Tensor, returns_A: Tensor) -> None:
        """Add one trajectory's action tokens, all finite or not at all; the oldest leaves when the window is full."""
        if bool(torch.isfinite(values_A).all()) and bool(torch.isfinite(returns_A).all()):
            self._pairs.append((values_A, returns_A))

    def explained_variance(self) -> float:
        """EV over all tokens of the window; NaN while it is undefined."""
        if not self._pairs:
            return math.nan
        return explained_variance(torch.cat([v for v, _ in self._pairs]), torch.cat([r for _, r in self._pairs]))
