"""Staleness: which tokens are too old to carry weight, decided when a trajectory is consumed.

Letters: T tokens of one trajectory, prompt included.
lag of a token = trainer's update - update of the version that sampled it, through the common ancestor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

StalePolicy = Literal["mask_tokens", "drop"]


@dataclass(frozen=True)
class StaleDecision:
    """What staleness makes of one trajectory."""

    drop: bool
    stale_mask_T: Tensor
    """True on action tokens with lag > max_lag: they count as rejected."""
    lag: int
    """Lag of the oldest action token."""


def judge_staleness(lag_T: Tensor, action_mask_T: Tensor, max_lag: int, policy: StalePolicy) -> StaleDecision:
    """Mask the tokens older than `max_lag` updates; drop the trajectory when the policy says so or none is left.

    lag_T: [T] int, read on action tokens only; action_mask_T: [T] bool with at least one True.
    """
    stale_mask_T = action_mask_T & (lag_T > max_lag)
    lag = int(lag_T[action_mask_T].max())
    drop = lag > max_lag if policy == "drop" else bool((stale_mask_T == action_mask_T).all())
    return StaleDecision(drop, stale_mask_T, lag)
