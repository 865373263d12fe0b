"""The definitions of docs/algorithm.md written once more, by another way, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from services.trainer.core.update import TrajectoryTensors, UpdateSettings


def textbook_gae(values: list[float], rewards: list[float], gamma: float, lam: float) -> list[float]:
    """A_j as the explicit sum of discounted deltas, terminal bootstrap 0."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[j:])) for j in range(len(deltas))]


def compact_gae(values: list[float], mask: list[bool], reward: float, gamma: float, lam: float) -> list[float]:
    """Delete what is not an action, run textbook GAE with the reward on the last action, put zeros back."""
    kept = [value for value, action in zip(values, mask, strict=True) if action]
    rewards = [0.0] * (len(kept) - 1) + [reward]
    advantages = iter(textbook_gae(kept, rewards, gamma, lam))
    return [next(advantages) if action else 0.0 for action in mask]


def one_batch_update(
    policy: nn.Module, critic: nn.Module, trajectories: list[TrajectoryTensors], settings: UpdateSettings, lr: float
) -> None:
    """One SAO update with means over the whole batch at once: one loss, one backward, one step for each pass."""
    policy_steps = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    trained = [parameter for parameter in critic.parameters() if parameter.requires_grad]
    critic_steps = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    mask_N = torch.cat([t.action_mask_T for t in trajectories])
    advantages_N = torch.cat([_advantages(critic, t, settings) for t in trajectories])
    rewards_N = torch.cat([torch.full((len(t.tokens_T),), t.reward, dtype=torch.float64) for t in trajectories])
    logp_N = torch.cat([policy(t.tokens_T)[0] for t in trajectories])
    ratio_N = torch.exp(logp_N.detach() - torch.cat([t.logp_rollout_T for t in trajectories]).double())
    keep_N = (ratio_N > 1 - settings.eps_low) & (ratio_N < 1 + settings.eps_high) & mask_N

    for _ in range(settings.critic_updates):
        values_N = torch.cat([critic(t.tokens_T) for t in trajectories])
        critic_steps.zero_grad()
        torch.autograd.backward((values_N - rewards_N)[mask_N].square().mean())
        nn.utils.clip_grad_norm_(trained, 1.0)
        critic_steps.step()
    torch.autograd.backward(-(ratio_N * advantages_N * logp_N)[keep_N].sum() / mask_N.sum())
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    policy_steps.step()


def _advantages(critic: nn.Module, trajectory: TrajectoryTensors, settings: UpdateSettings) -> Tensor:
    actions = int(trajectory.action_mask_T.sum())
    lam = max(0.0, min(1.0, 1.0 - 1.0 / (settings.alpha * actions)))
    values = critic(trajectory.tokens_T).tolist()
    mask = trajectory.action_mask_T.tolist()
    assert all(math.isfinite(value) for value in values)
    return torch.tensor(compact_gae(values, mask, trajectory.reward, settings.gamma, lam), dtype=torch.float64)
