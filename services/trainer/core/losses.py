"""The losses of one trajectory, each a SUM over its tokens: the update divides once, by all of its tokens.

Letters: T tokens of one trajectory, prompt included. Masks are bool; where they are False a term is exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss_sum(logp_T: Tensor, weight_T: Tensor, advantages_T: Tensor) -> Tensor:
    """Minus the DIS objective, -sum f(r) A log pi (arXiv 2602.15763, Eq. 3).

    f(r) A is detached, so the gradient is f(r) A grad log pi; letting autograd through r too would add a factor.
    """
    coefficient_T = (weight_T * advantages_T).detach()
    return -_masked_sum(coefficient_T * _select(logp_T, weight_T != 0), weight_T != 0)


def critic_loss_sum(values_T: Tensor, returns_T: Tensor, action_mask_T: Tensor) -> Tensor:
    """Sum of (V - R)^2 over action tokens."""
    error_T = _select(values_T, action_mask_T) - returns_T.detach()
    return _masked_sum(error_T * error_T, action_mask_T)


def k3_estimate(log_ratio: Tensor) -> Tensor:
    """k3 estimate of KL(p || q) from samples of p: exp(x) - 1 - x with x = log q - log p; never negative."""
    return torch.expm1(log_ratio) - log_ratio


def reference_kl_sum(logp_T: Tensor, logp_reference_T: Tensor, mask_T: Tensor) -> Tensor:
    """Sum of the k3 estimates of KL(policy || frozen initial policy)."""
    log_ratio_T = logp_reference_T.detach().to(logp_T.dtype) - logp_T
    return _masked_sum(k3_estimate(_select(log_ratio_T, mask_T)), mask_T)


def entropy_sum(entropy_T: Tensor, mask_T: Tensor) -> Tensor:
    """Sum of the entropies of the distributions the masked tokens were drawn from."""
    return _masked_sum(entropy_T, mask_T)


def negative_log_likelihood_sum(logp_T: Tensor, mask_T: Tensor) -> Tensor:
    """Minus the log-probs of the masked tokens (VAPO, arXiv 2504.05118, Eq. 11: imitate what was right)."""
    return -_masked_sum(logp_T, mask_T)


def _select(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """X where the mask is, 0 elsewhere: also where x is not finite, in value and in gradient."""
    return torch.where(mask_T, x_T, torch.zeros_like(x_T))


def _masked_sum(x_T: Tensor, mask_T: Tensor) -> Tensor:
    return _select(x_T, mask_T).sum()
