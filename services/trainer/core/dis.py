"""Direct double-sided importance sampling (DIS): GLM-5 report (arXiv 2602.15763), Eq. 3-5.

    r_t  = exp(log pi_theta(a_t|s_t) - log pi_rollout(a_t|s_t))
    f(r) = r  where 1 - eps_low < r < 1 + eps_high, else 0

Everything is compared in log space and selected before `exp`: 0 * inf would be NaN.
Letters: T tokens of one trajectory, prompt included; A its action tokens, in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Verdict(IntEnum):
    """What became of an action token; the first that applies, in the order NON_FINITE, STALE, LOW / HIGH, ACCEPTED."""

    ACCEPTED = 0
    REJECTED_LOW = 1
    REJECTED_HIGH = 2
    STALE = 3
    NON_FINITE = 4


@dataclass(frozen=True)
class DisStats:
    """Per action token: the log-ratio as it came (it may be NaN or infinite) and the verdict."""

    log_ratio_A: Tensor
    verdict_A: Tensor
    """[A] int64, values of `Verdict`."""

    def count(self, verdict: Verdict) -> int:
        """How many action tokens got this verdict."""
        return int((self.verdict_A == verdict).sum())


def importance_weights(  # noqa: PLR0917 - the order of the formula's symbols
    logp_T: Tensor,
    logp_rollout_T: Tensor,
    action_mask_T: Tensor,
    eps_low: float,
    eps_high: float,
    stale_mask_T: Tensor | None = None,
) -> tuple[Tensor, DisStats]:
    """f(r) of every token, detached and never NaN: 0 where rejected, stale or not an action (Eq. 4).

    logp_T, logp_rollout_T: [T] nats; action_mask_T, stale_mask_T: [T] bool; 0 < eps_low <= 1, eps_high > 0.
    Computes in max(float32, the inputs' dtype).
    """
    dtype = torch.promote_types(torch.promote_types(logp_T.dtype, logp_rollout_T.dtype), torch.float32)
    log_ratio_T = logp_T.detach().to(dtype) - logp_rollout_T.to(dtype)
    log_low = math.log1p(-eps_low) if eps_low < 1 else -math.inf
    log_high = math.log1p(eps_high)

    verdict_T = torch.full_like(log_ratio_T, Verdict.ACCEPTED, dtype=torch.int64)
    verdict_T[log_ratio_T <= log_low] = Verdict.REJECTED_LOW
    verdict_T[log_ratio_T >= log_high] = Verdict.REJECTED_HIGH
    if stale_mask_T is not None:
        verdict_T[stale_mask_T] = Verdict.STALE
    verdict_T[~torch.isfinite(log_ratio_T)] = Verdict.NON_FINITE

    accepted_T = action_mask_T & (verdict_T == Verdict.ACCEPTED)
    zero_T = torch.zeros_like(log_ratio_T)
    weight_T = torch.where(accepted_T, torch.where(accepted_T, log_ratio_T, zero_T).exp(), zero_T)
    return weight_T, DisStats(log_ratio_T[action_mask_T], verdict_T[action_mask_T])
