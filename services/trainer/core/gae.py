"""Generalised advantage estimation that skips observations (arXiv 2607.07508, section 3).

The positions with mask 0 are deleted, then textbook GAE runs over the action tokens i_1 < ... < i_n:

    delta_j = rho_j + gamma V_{j+1} - V_j        V_{n+1} = 0, rho_n = reward, every other rho 0
    A_j     = delta_j + gamma lambda A_{j+1}
    G_j     = A_j + V_j

V_j is the value of the state before token i_j. The reward sits on the last ACTION token, wherever the trajectory ends.
Letters: T tokens of one trajectory, prompt included; A its action tokens, in order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def skip_observation_gae(
    values_T: Tensor, action_mask_T: Tensor, reward: float, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [T] in max(float32, values' dtype), 0 where the mask is False.

    values_T: [T], values_T[t] of the state before token t, read on action tokens only; action_mask_T: [T] bool.
    """
    dtype = torch.promote_types(values_T.dtype, torch.float32)
    values_A = values_T.detach()[action_mask_T].tolist()
    advantages_A = [0.0] * len(values_A)
    next_value, next_advantage, rho = 0.0, 0.0, reward
    for j in reversed(range(len(values_A))):
        delta = rho + gamma * next_value - values_A[j]
        next_advantage = advantages_A[j] = delta + gamma * lam * next_advantage
        next_value, rho = values_A[j], 0.0

    advantages_T = torch.zeros(values_T.shape, dtype=dtype, device=values_T.device)
    returns_T = torch.zeros_like(advantages_T)
    advantages_T[action_mask_T] = torch.tensor(advantages_A, dtype=dtype, device=values_T.device)
    returns_A = [advantage + value for advantage, value in zip(advantages_A, values_A, strict=True)]
    returns_T[action_mask_T] = torch.tensor(returns_A, dtype=dtype, device=values_T.device)
    return advantages_T, returns_T


def length_adaptive_lambda(n_actions: int, alpha: float) -> float:
    """lambda_policy = clamp(1 - 1 / (alpha l), 0, 1) for l action tokens; ValueError for l < 1."""
    if n_actions < 1:
        msg = f"lambda needs at least one action token, found {n_actions}"
        raise ValueError(msg)
    return min(max(1.0 - 1.0 / (alpha * n_actions), 0.0), 1.0)
