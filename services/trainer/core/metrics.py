"""The numbers of one update (docs/algorithm.md, "Metrics every update must log"), from its trajectories' token records.

A number that is undefined in an update (no such token, no variance) is absent, never NaN.
Letters: A action tokens of one trajectory, N those of the whole update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.core.dis import DisStats, Verdict
from services.trainer.core.losses import k3_estimate

LOG_RATIO_BOUND = 30.0
"""Log-ratios are clamped to this for ratio and KL statistics, so that one absurd token leaves them finite."""

LAG_BUCKETS: tuple[tuple[str, int, int], ...] = (
    ("0", 0, 0),
    ("1", 1, 1),
    ("2", 2, 2),
    ("3_4", 3, 4),
    ("5_8", 5, 8),
    ("9_16", 9, 16),
    ("17_up", 17, 2**62),
)
"""(name, first lag, last lag) of the classes that the `.lag_<name>` metrics count."""


@dataclass(frozen=True)
class TokenRecord:
    """What the metrics need of one trajectory's action tokens, on the CPU."""

    dis: DisStats
    lag_A: Tensor
    values_A: Tensor
    entropy_A: Tensor
    kl_reference_A: Tensor | None
    reward: float
    routing_disagreement_A: Tensor | None = None
    """Share of the decisions behind each token whose recorded expert is not the own router's; NaN without a record."""


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """Exp of the clamped log-ratio: finite, or NaN where the log-ratio is NaN."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def token_metrics(records: Sequence[TokenRecord]) -> dict[str, float]:
    """Every metric that is a function of the update's tokens; `records` holds at least one action token."""
    verdict_N = torch.cat([record.dis.verdict_A for record in records])
    log_ratio_N = torch.cat([record.dis.log_ratio_A for record in records]).double()
    lag_N = torch.cat([record.lag_A for record in records])
    finite_N = torch.isfinite(log_ratio_N)

    numbers = {"action_tokens": float(verdict_N.numel()), "trajectories": float(len(records))}
    numbers |= _verdict_fractions(verdict_N, "")
    for name, first, last in LAG_BUCKETS:
        inside_N = (lag_N >= first) & (lag_N <= last)
        if bool(inside_N.any()):
            numbers[f"dis_tokens.lag_{name}"] = float(inside_N.sum())
            numbers |= _verdict_fractions(verdict_N[inside_N], f".lag_{name}")

    ratio_N = bounded_ratio(log_ratio_N[finite_N])
    kl_N = k3_estimate(log_ratio_N[finite_N].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    numbers["ratio_mean"] = _mean(ratio_N)
    numbers["ratio_p99"] = float(torch.quantile(_sample(ratio_N), 0.99)) if ratio_N.numel() else math.nan
    numbers["ratio_max"] = float(ratio_N.max()) if ratio_N.numel() else math.nan
    numbers["kl_rollout"] = _mean(kl_N)
    numbers["kl_rollout.lag_0"] = _mean(kl_N[lag_N[finite_N] == 0])

    numbers["entropy"] = _mean(torch.cat([record.entropy_A for record in records]))
    references = [record.kl_reference_A for record in records if record.kl_reference_A is not None]
    if references:
        numbers["kl_reference"] = _mean(torch.cat(references))
    disagreements = [r.routing_disagreement_A for r in records if r.routing_disagreement_A is not None]
    if disagreements:
        disagreement_N = torch.cat(disagreements)
        numbers["routing_disagreement"] = _mean(disagreement_N[~disagreement_N.isnan()])
    numbers["value_mean"] = _mean(torch.cat([record.values_A for record in records]))  # undefined without a critic
    numbers["reward_mean"] = sum(record.reward for record in records) / len(records)
    numbers["lag_mean"] = _mean(lag_N)
    numbers["lag_max"] = float(lag_N.max())
    return defined(numbers)


def defined(numbers: dict[str, float]) -> dict[str, float]:
    """The finite ones."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _verdict_fractions(verdict_N: Tensor, suffix: str) -> dict[str, float]:
    return {
        f"dis_{verdict.name.lower()}_fraction{suffix}": float((verdict_N == verdict).double().mean())
        for verdict in Verdict
    }


def _mean(x_N: Tensor) -> float:
    return float(x_N.double().mean()) if x_N.numel() else math.nan


def _sample(x_N: Tensor, most: int = 1_000_000) -> Tensor:
    """Every n-th element, so that at most `most` are left: torch.quantile refuses more than 16 million."""
    return x_N[:: math.ceil(x_N.numel() / most)]
