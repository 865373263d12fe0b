"""Two float64 networks small enough to be differentiated by hand, and trajectories for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from services.trainer.backends.paired import PairedBackend
from services.trainer.backends.role import OptimizerOptions
from services.trainer.backends.torch_reference import TorchRole
from services.trainer.core.update import TrajectoryTensors

VOCABULARY = 7
OPTIONS = OptimizerOptions(lr=0.05, betas=(0.9, 0.99), weight_decay=0.0, gradient_clip=1.0)


class ToyPolicy(nn.Module):
    """Next-token logits from the mean embedding of all tokens before: causal, exact in float64; [T] or [B, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5, dtype=torch.float64)
        self.out = nn.Linear(5, VOCABULARY, dtype=torch.float64)

    def logp_TV(self, tokens_T: Tensor) -> Tensor:  # noqa: N802
        hidden_TD = self.embed(tokens_T[..., :-1])
        counts_T = torch.arange(1, hidden_TD.shape[-2] + 1, dtype=torch.float64)
        return torch.log_softmax(self.out(hidden_TD.cumsum(-2) / counts_T[:, None]), -1)

    def forward(self, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        logp_TV = self.logp_TV(tokens_T)
        logp_T = logp_TV.gather(-1, tokens_T[..., 1:, None]).squeeze(-1)
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        return nn.functional.pad(logp_T, (1, 0)), nn.functional.pad(entropy_T, (1, 0))


class ToyCritic(nn.Module):
    """A value per prefix, with a frozen embedding below."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5, dtype=torch.float64)
        self.embed.weight.requires_grad_(False)
        self.hidden = nn.Linear(5, 5, dtype=torch.float64)
        self.head = nn.Linear(5, 1, dtype=torch.float64)

    def forward(self, tokens_T: Tensor) -> Tensor:
        values_T: Tensor = self.head(torch.tanh(self.hidden(self.embed(tokens_T[..., :-1])))).squeeze(-1)
        return nn.functional.pad(values_T, (1, 0))


def toy_backend(seed: int = 0, *, reference: bool = False, options: OptimizerOptions = OPTIONS) -> PairedBackend:
    """A fresh pair of networks; the same seed gives the same ones."""
    torch.manual_seed(seed)
    policy, critic = ToyPolicy(), ToyCritic()
    frozen = ToyPolicy() if reference else None
    return PairedBackend(TorchRole(policy, options), TorchRole(critic, options), frozen, torch.device("cpu"))


def toy_trajectory(backend: PairedBackend, seed: int, *, off_policy: float = 0.0, length: int = 9) -> TrajectoryTensors:
    """Random tokens and mask; rollout log-probs are the policy's own, moved by up to `off_policy` nats."""
    draw = torch.Generator().manual_seed(seed)
    tokens_T = torch.randint(VOCABULARY, (length,), generator=draw)
    mask_T = torch.rand(length, generator=draw) < 0.6
    mask_T[0], mask_T[-2], mask_T[-1] = False, True, bool(seed % 2)
    noise_T = (torch.rand(length, generator=draw, dtype=torch.float64) * 2 - 1) * off_policy
    logp_T = backend.policy_evaluate(tokens_T).logp_T + noise_T
    zeros_T = torch.zeros(length, dtype=torch.int64)
    return TrajectoryTensors(tokens_T, mask_T, torch.where(mask_T, logp_T, 0.0), zeros_T, float(seed % 3 == 0))


def with_lag(trajectory: TrajectoryTensors, lag: int) -> TrajectoryTensors:
    """The same trajectory, sampled `lag` updates ago."""
    return replace(trajectory, lag_T=torch.where(trajectory.action_mask_T, lag, 0))


def states(backend: PairedBackend) -> dict[str, Tensor]:
    """Every tensor of both networks."""
    return {f"policy.{k}": v for k, v in backend.policy_state().items()} | {
        f"critic.{k}": v for k, v in backend.critic_state().items()
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
