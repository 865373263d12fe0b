"""PPO's clipped surrogate (arXiv 1707.06347, Eq. 7) with separate bounds (DAPO, arXiv 2503.14476), as token weights.

    rho_t = exp(log pi_theta(a_t|s_t) - log pi_old(a_t|s_t))
    maximise  E_t[ min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t) ]

Where the minimum is the clipped branch its gradient is 0, elsewhere it is rho_t A_t grad log pi. So the surrogate has
the gradient of `losses.policy_loss_sum` with weight rho_t, or 0 where clipped; unlike DIS, the sign of A_t decides.
Letters: T tokens of one trajectory, prompt included.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.trainer.core.dis import Verdict


def clipped_weights(  # noqa: PLR0917 - the order of the formula's symbols
    logp_T: Tensor,
    logp_old_T: Tensor,
    advantages_T: Tensor,
    action_mask_T: Tensor,
    clip_low: float,
    clip_high: float,
    stale_mask_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """(rho of every token, 0 where clipped, stale, not finite or not an action; its `Verdict`), detached, never NaN.

    logp_T, logp_old_T: [T] nats; masks: [T] bool. Computes in max(float32, the inputs' dtype).
    """
    dtype = torch.promote_types(torch.promote_types(logp_T.dtype, logp_old_T.dtype), torch.float32)
    log_ratio_T = logp_T.detach().to(dtype) - logp_old_T.detach().to(dtype)

    verdict_T = torch.full_like(log_ratio_T, Verdict.ACCEPTED, dtype=torch.int64)
    verdict_T[(log_ratio_T < math.log1p(-clip_low)) & (advantages_T < 0)] = Verdict.REJECTED_LOW
    verdict_T[(log_ratio_T > math.log1p(clip_high)) & (advantages_T > 0)] = Verdict.REJECTED_HIGH
    verdict_T[stale_mask_T] = Verdict.STALE
    verdict_T[~torch.isfinite(log_ratio_T)] = Verdict.NON_FINITE

    accepted_T = action_mask_T & (verdict_T == Verdict.ACCEPTED)
    zero_T = torch.zeros_like(log_ratio_T)
    weight_T = torch.where(accepted_T, torch.where(accepted_T, log_ratio_T, zero_T).exp(), zero_T)
    return weight_T, verdict_T
