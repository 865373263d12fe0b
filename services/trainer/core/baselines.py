"""Advantages from rewards alone: what takes the critic's place in the algorithms that have none.

    group            A_i = (R_i - mean(R)) / (std(R) + 1e-6) over the G rollouts of one prompt (GRPO, arXiv 2402.03300)
    moving average   A = R - mean of the last rewards, of this prompt or of all
    tracker          v = alpha / (alpha + beta);  A = R - v, then normalised over the update;
                     alpha <- rho alpha + R,  beta <- rho beta + 1 - R,  rho = clip(2^(-D / D_half), rho_min, rho_max)
                     (SPO, arXiv 2509.13232)

A baseline is read for a whole update before any reward of that update is learned, so the order within an update does
not matter. Every number is a float: rewards, and `drift`, the mean KL (nats per token) by which the policy has moved.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev, stdev
from typing import Protocol

from sao.config.schema import MovingAverageSection, RunConfig, SpoSection

_EPSILON = 1e-6

State = dict[str, list[float]]
"""What a baseline remembers, by prompt id: in a checkpoint and, through JSON, back."""


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """(R - mean) / (std + 1e-6), std over G - 1 as in the common implementations; zeros where all rewards are equal.

    ValueError for a group of one.
    """
    if len(rewards) < 2:
        msg = f"a group of {len(rewards)}: expected at least 2 rewards to compare"
        raise ValueError(msg)
    return _standardised(rewards, stdev(rewards))


def normalised(advantages: Sequence[float]) -> list[float]:
    """Mean 0 and standard deviation 1 (over n) across the update's trajectories; zeros where all are equal."""
    return _standardised(advantages, pstdev(advantages))


def _standardised(values: Sequence[float], spread: float) -> list[float]:
    if min(values) == max(values):
        return [0.0] * len(values)  # exactly: a mean may differ from equal values by rounding
    mean = fmean(values)
    return [(value - mean) / (spread + _EPSILON) for value in values]


class Baseline(Protocol):
    """What a reward is compared with."""

    def value(self, prompt: str) -> float:
        """The baseline of a rollout of this prompt."""

    def learn(self, prompt: str, reward: float, drift: float) -> None:
        """Take in a trained rollout."""

    def state(self) -> State: ...

    def load(self, state: Mapping[str, Sequence[float]]) -> None: ...


class MovingAverage:
    """The mean of the last rewards; 0 before the first."""

    def __init__(self, settings: MovingAverageSection) -> None:
        self._global = settings.scope == "global"
        self._window = settings.rewards
        self._rewards: dict[str, deque[float]] = {}

    def value(self, prompt: str) -> float:
        rewards = self._rewards.get(self._key(prompt))
        return fmean(rewards) if rewards else 0.0

    def learn(self, prompt: str, reward: float, drift: float) -> None:  # noqa: ARG002 - an average does not forget by drift
        self._rewards.setdefault(self._key(prompt), deque(maxlen=self._window)).append(reward)

    def state(self) -> State:
        return {key: list(rewards) for key, rewards in self._rewards.items()}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        self._rewards = {key: deque(rewards, maxlen=self._window) for key, rewards in state.items()}

    def _key(self, prompt: str) -> str:
        return "" if self._global else prompt


class BetaTracker:
    """A Beta distribution for each prompt's chance of success, uniform at first, that forgets as the policy moves."""

    def __init__(self, settings: SpoSection) -> None:
        self._settings = settings
        self._counts: dict[str, tuple[float, float]] = {}

    def value(self, prompt: str) -> float:
        alpha, beta = self._counts.get(prompt, (1.0, 1.0))
        return alpha / (alpha + beta)

    def learn(self, prompt: str, reward: float, drift: float) -> None:
        """ValueError for a reward outside [0, 1], of which a Beta distribution knows nothing."""
        if not 0 <= reward <= 1:
            msg = f"prompt {prompt!r}: reward {reward}, expected 0 to 1 for spo: weigh the components accordingly"
            raise ValueError(msg)
        settings = self._settings
        rho = min(max(2.0 ** (-drift / settings.drift_half), settings.rho_min), settings.rho_max)
        alpha, beta = self._counts.get(prompt, (1.0, 1.0))
        self._counts[prompt] = (rho * alpha + reward, rho * beta + 1.0 - reward)

    def state(self) -> State:
        return {prompt: list(counts) for prompt, counts in self._counts.items()}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        self._counts = {prompt: (alpha, beta) for prompt, (alpha, beta) in state.items()}


def baseline_of(config: RunConfig) -> Baseline | None:
    """The run's baseline; None where advantages come from the critic or the group."""
    match config.algorithm.advantage:
        case "moving_average":
            return MovingAverage(config.moving_average)
        case "tracker":
            return BetaTracker(config.spo)
    return None


def reward_range(config: RunConfig) -> tuple[float, float]:
    """Lowest and highest reward that the run's algorithm can learn from."""
    return (0.0, 1.0) if config.algorithm.advantage == "tracker" else (-math.inf, math.inf)
