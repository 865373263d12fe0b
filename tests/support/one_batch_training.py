"""The update of docs/algorithm.md on one padded batch: what one trajectory at a time has to add up to.

Plain torch, and none of the trainer's own losses, advantages, accumulation or clipping: one forward of all
trajectories, one loss with its mean written out, one backward and one AdamW step for each pass.
Letters: B trajectories, T tokens of the longest; padding is on the right, where a causal network never looks from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoModelForCausalLM

from services.trainer.backends.base import TrainingBackend
from services.trainer.backends.role import OptimizerOptions
from services.trainer.core.dis import Verdict
from services.trainer.core.update import TrajectoryTensors, Update, UpdateSettings, UpdateStats
from tests.support.float64_oracle import length_adaptive_lambda, skip_observation_gae

Norms = dict[str, list[float]]
"""By role, the gradient norm before clipping of every step: AdamW and clipping hide a wrong divisor, these do not."""


class OneBatchTrainer:
    """Both networks with an AdamW each; only parameters that require a gradient are trained.

    `policy(tokens_BT)` gives the log-prob and the entropy of each token given those before it, `critic(tokens_BT)` the
    value before each token, all [B, T] and 0 at the first; `reference` is the frozen initial policy.
    """

    def __init__(
        self,
        policy: nn.Module,
        critic: nn.Module,
        reference: nn.Module,
        settings: UpdateSettings,
        options: OptimizerOptions,
    ) -> None:
        self.networks = {"policy": policy, "critic": critic}
        self._reference = reference
        self._settings = settings
        self._clip = options.gradient_clip
        self._optimizers = {
            role: torch.optim.AdamW(
                self._trained(role), lr=options.lr, betas=options.betas, weight_decay=options.weight_decay
            )
            for role in self.networks
        }

    def load(self, directory: Path) -> None:
        """Continue from weights and moments that a backend saved."""
        steps = json.loads((directory / "backend.json").read_text())["steps"]
        for role, network in self.networks.items():
            network.load_state_dict(load_file(directory / f"{role}.safetensors"))
            moments = load_file(directory / f"{role}-optimizer.safetensors")
            for name, parameter in network.named_parameters():
                if parameter.requires_grad:
                    state = {key: moments[f"{key}/{name}"] for key in ("exp_avg", "exp_avg_sq")}
                    self._optimizers[role].state[parameter] = {"step": torch.tensor(float(steps[role])), **state}

    def states(self) -> dict[str, Tensor]:
        """Every tensor of both networks, now, by role and transformers name."""
        return {
            f"{role}.{name.removeprefix('model.') if role == 'policy' else name}": parameter.detach().clone()
            for role, network in self.networks.items()
            for name, parameter in network.named_parameters()
        }

    def update(self, trajectories: Sequence[TrajectoryTensors]) -> Norms:
        """K critic steps and one policy step on all of them at once."""
        settings = self._settings
        policy, critic = self.networks["policy"], self.networks["critic"]
        tokens_BT = pad_sequence([t.tokens_T for t in trajectories], batch_first=True)
        mask_BT = pad_sequence([t.action_mask_T for t in trajectories], batch_first=True)
        lag_BT = pad_sequence([t.lag_T for t in trajectories], batch_first=True)
        rollout_BT = pad_sequence([t.logp_rollout_T for t in trajectories], batch_first=True)
        with torch.no_grad():
            reference_BT, _ = self._reference(tokens_BT)
            values_BT = critic(tokens_BT)
        advantages_BT, returns_BT = self._advantages_and_returns(values_BT, mask_BT, [t.reward for t in trajectories])

        norms: Norms = {"critic": [], "policy": []}
        for _ in range(settings.critic_updates):
            error_BT = critic(tokens_BT) - returns_BT
            norms["critic"].append(self._step("critic", error_BT[mask_BT].square().mean()))

        logp_BT, entropy_BT = policy(tokens_BT)
        ratio_BT = torch.exp(logp_BT.detach() - rollout_BT)
        fresh_BT = mask_BT & (lag_BT <= settings.max_lag)
        keep_BT = fresh_BT & (ratio_BT > 1 - settings.eps_low) & (ratio_BT < 1 + settings.eps_high)
        distance_BT = reference_BT - logp_BT
        k3_BT = torch.exp(distance_BT) - 1 - distance_BT
        loss_BT = -torch.where(keep_BT, ratio_BT * advantages_BT * logp_BT, 0.0)
        loss_BT += torch.where(fresh_BT, settings.kl_coef * k3_BT - settings.entropy_coef * entropy_BT, 0.0)
        if settings.loss_aggregation == "token_mean":
            loss = loss_BT.sum() / mask_BT.sum()
        else:
            loss = (loss_BT.sum(1) / mask_BT.sum(1)).mean()
        norms["policy"].append(self._step("policy", loss))
        return norms

    def _advantages_and_returns(
        self, values_BT: Tensor, mask_BT: Tensor, rewards: list[float]
    ) -> tuple[Tensor, Tensor]:
        """Advantages with the policy's lambda, returns with the critic's."""
        settings, advantages, returns = self._settings, [], []
        for values, mask, reward in zip(values_BT.tolist(), mask_BT.tolist(), rewards, strict=True):
            lam = length_adaptive_lambda(sum(mask), settings.alpha)
            advantages.append(skip_observation_gae(values, mask, reward, settings.gamma, lam)[0])
            returns.append(skip_observation_gae(values, mask, reward, settings.gamma, settings.lambda_critic)[1])
        return torch.tensor(advantages, dtype=values_BT.dtype), torch.tensor(returns, dtype=values_BT.dtype)

    def _step(self, role: str, loss: Tensor) -> float:
        self._optimizers[role].zero_grad()
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(self._trained(role), self._clip)
        self._optimizers[role].step()
        return float(norm)

    def _trained(self, role: str) -> list[nn.Parameter]:
        return [parameter for parameter in self.networks[role].parameters() if parameter.requires_grad]


def one_by_one(
    backend: TrainingBackend, update: Update, trajectories: Sequence[TrajectoryTensors]
) -> tuple[Norms, UpdateStats]:
    """The same by the code under test: each trajectory alone."""
    norms: Norms = {"critic": [], "policy": []}

    def noting(role: str, step: Callable[[float], float]) -> Callable[[float], float]:
        def noted(denominator: float) -> float:
            norms[role].append(step(denominator))
            return norms[role][-1]

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "critic_step", noting("critic", backend.critic_step))
        patch.setattr(backend, "policy_step", noting("policy", backend.policy_step))
        update.begin()
        for trajectory in trajectories:
            update.accumulate(trajectory)
        stats = update.finish()
    assert not stats.skipped, stats.skipped_reason
    return norms, stats


def every_fate(stats: UpdateStats) -> bool:
    """Whether tokens were accepted, too unlikely, too likely and stale in this update."""
    fates = (Verdict.ACCEPTED, Verdict.REJECTED_LOW, Verdict.REJECTED_HIGH, Verdict.STALE)
    return all(stats.metrics[f"dis_{fate.name.lower()}_fraction"] > 0 for fate in fates)


def uneven_trajectories(backend: TrainingBackend, vocabulary: int, count: int, seed: int) -> list[TrajectoryTensors]:
    """Lengths 3 to 20, lags 0 to 5, rewards of all sizes, log-ratios of -0.8 to 2.2 under the backend's policy."""
    draw = torch.Generator().manual_seed(seed)
    trajectories = []
    for _ in range(count):
        length = int(torch.randint(3, 21, (1,), generator=draw))
        tokens_T = torch.randint(vocabulary, (length,), generator=draw)
        mask_T = torch.rand(length, generator=draw) < 0.6
        mask_T[0], mask_T[1] = False, True
        logp_T = backend.policy_evaluate(tokens_T).logp_T
        log_ratio_T = 3 * torch.rand(length, generator=draw) - 0.8
        rollout_T = torch.where(mask_T, logp_T - log_ratio_T, 0.0)
        lag_T = torch.where(mask_T, torch.randint(6, (length,), generator=draw), 0)
        reward = float(torch.randn(1, generator=draw))
        trajectories.append(TrajectoryTensors(tokens_T, mask_T, rollout_T, lag_T, reward))
    return trajectories


class PaddedPolicy(nn.Module):
    """A causal language model of transformers with its full logits; parameters named as the trainer saves them."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        logp_BTV = torch.log_softmax(self.model(input_ids=tokens_BT).logits[:, :-1], -1)
        logp_BT = logp_BTV.gather(-1, tokens_BT[:, 1:, None])[:, :, 0]
        entropy_BT = -(logp_BTV.exp() * logp_BTV).sum(-1)
        return nn.functional.pad(logp_BT, (1, 0)), nn.functional.pad(entropy_BT, (1, 0))


class PaddedCritic(nn.Module):
    """The backbone with a linear head; of it, experts and head are trained (arXiv 2607.07508, section 3)."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self.backbone = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.head = nn.Linear(self.backbone.config.hidden_size, 1)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".mlp.experts." in name or name.startswith("head."))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTD = self.backbone(input_ids=tokens_BT[:, :-1]).last_hidden_state
        return nn.functional.pad(self.head(hidden_BTD)[:, :, 0], (1, 0))
