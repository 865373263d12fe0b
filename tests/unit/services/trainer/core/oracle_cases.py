"""Random trajectories for test_oracle.py: every kind of trouble, in turn, in every precision."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
"""Of the networks' outputs; the engine's log-probs are float32 beside bfloat16 ones, else the same."""
HUGE = 1e4
"""Nats."""


class Kind(Enum):
    """What is special about a case; mask and log-ratios are random otherwise."""

    ORDINARY = auto()
    MASKED_TAIL = auto()
    ONE_ACTION = auto()
    ONE_TOKEN_TURNS = auto()
    HUGE_RATIO = auto()
    NON_FINITE = auto()
    ALL_REJECTED = auto()
    BORDER = auto()
    STALE = auto()


@dataclass(frozen=True)
class Case:
    """One trajectory, and one window of action tokens for the explained variance.

    On what is not an action, log-probs and value are NaN in half of the cases, else 0: nothing may read them.
    """

    kind: Kind
    mask: list[bool]
    stale: list[bool]
    logp_T: Tensor
    logp_rollout_T: Tensor
    eps_low: float
    eps_high: float
    values_T: Tensor
    reward: float
    gamma: float
    lam: float
    alpha: float
    window_values_N: Tensor
    window_returns_N: Tensor
    """Constant in a third of the cases, as within one trajectory; N may be 0."""

    @property
    def exact(self) -> torch.dtype:
        """The precision in which the code computes: max(float32, the inputs')."""
        return torch.promote_types(self.logp_T.dtype, torch.float32)


def make_cases(count: int, seed: int) -> list[Case]:
    """`count` cases, all kinds and precisions equally often."""
    rng = random.Random(seed)
    kinds = list(Kind)
    return [_case(rng, kinds[i % len(kinds)], DTYPES[i // len(kinds) % len(DTYPES)]) for i in range(count)]


def _case(rng: random.Random, kind: Kind, dtype: torch.dtype) -> Case:
    rollout_dtype = torch.promote_types(dtype, torch.float32)
    eps_low = rng.choice([0.3, 0.8, rng.uniform(0.05, 0.95)] + [1.0] * (kind is Kind.ORDINARY))
    eps_high = rng.choice([3.0, 5.0, rng.uniform(0.05, 10.0)])

    mask = _mask(rng, kind)
    special = [action and (kind is Kind.ALL_REJECTED or rng.random() < 0.5) for action in mask]
    special[rng.choice([t for t, action in enumerate(mask) if action])] = True
    draw = _LogProbs(
        rng, dtype, log_low=math.log1p(-eps_low) if eps_low < 1 else -math.inf, log_high=math.log1p(eps_high)
    )
    observed = rng.choice([math.nan, 0.0])
    pairs = [
        draw.pair(kind if chosen else Kind.ORDINARY) if action else (observed, observed)
        for action, chosen in zip(mask, special, strict=True)
    ]
    values = [rng.gauss(0.0, 2.0) if action else observed for action in mask]
    tokens = rng.randint(0, 20)
    constant = rng.choice([rng.gauss(0.0, 1.0), None, None])
    returns = [rng.gauss(0.0, 1.0) if constant is None else constant for _ in range(tokens)]
    return Case(
        kind=kind,
        mask=mask,
        stale=special if kind is Kind.STALE else [False] * len(mask),
        logp_T=torch.tensor([logp for logp, _ in pairs], dtype=dtype),
        logp_rollout_T=torch.tensor([rollout for _, rollout in pairs], dtype=rollout_dtype),
        eps_low=eps_low,
        eps_high=eps_high,
        values_T=torch.tensor(values, dtype=dtype),
        reward=rng.choice([0.0, 1.0, rng.gauss(0.0, 3.0)]),
        gamma=rng.choice([1.0, rng.random()]),
        lam=rng.choice([0.0, 1.0, rng.random()]),
        alpha=rng.choice([0.05, 1.5, rng.uniform(0.01, 5.0)]),
        window_values_N=torch.tensor([rng.gauss(0.0, 1.0) for _ in range(tokens)], dtype=dtype),
        window_returns_N=torch.tensor(returns, dtype=rollout_dtype),
    )


def _mask(rng: random.Random, kind: Kind) -> list[bool]:
    """A prompt, then turns with observations between them, and sometimes one after them."""
    turns = 1 if kind is Kind.ONE_ACTION else rng.randint(2, 3)
    longest = 1 if kind in {Kind.ONE_ACTION, Kind.ONE_TOKEN_TURNS} else 4
    mask = [False] * rng.randint(1, 3)
    for turn in range(turns):
        mask += [True] * rng.randint(1, longest)
        if turn < turns - 1 or kind is Kind.MASKED_TAIL or rng.random() < 0.5:
            mask += [False] * rng.randint(1, 3)
    return mask


@dataclass(frozen=True)
class _LogProbs:
    """Draws log-probs of one precision, for thresholds at these log-ratios."""

    rng: random.Random
    dtype: torch.dtype
    log_low: float
    log_high: float

    def pair(self, kind: Kind) -> tuple[float, float]:
        """The policy's and the engine's log-prob of one token that is as `kind` says."""
        rng = self.rng
        logp = torch.tensor(rng.uniform(-8.0, -2.5), dtype=self.dtype).item()
        at_low, at_high = logp - self.log_low, logp - self.log_high  # the engine's, where the bounds are met
        if kind is Kind.HUGE_RATIO:
            return rng.choice([(logp, logp - HUGE), (logp - HUGE, logp)])
        if kind is Kind.NON_FINITE:
            bad = [math.nan, math.inf, -math.inf]
            return rng.choice([(rng.choice(bad), logp), (logp, rng.choice(bad)), (-math.inf, -math.inf)])
        if kind is Kind.ALL_REJECTED:
            return logp, rng.choice([at_low + rng.uniform(0.01, 20.0), at_high - rng.uniform(0.01, 20.0), math.nan])
        if kind is Kind.BORDER:
            # More than the rounding of log-probs of this size, and far less than any other token's distance.
            margin = 64 * torch.finfo(torch.promote_types(self.dtype, torch.float32)).eps
            return logp, rng.choice([at_low, at_high]) + rng.choice([-margin, margin])
        return logp, logp - rng.uniform(-2.0, 3.0)
