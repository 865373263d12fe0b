"""Single-rollout asynchronous optimisation, one update at a time (arXiv 2607.07508, section 3; docs/algorithm.md).

    update = Update(backend, settings)
    forever:
        update.begin(critic_only=...)
        for each trajectory, as it arrives:
            update.accumulate(trajectory)      # V_old, advantages, importance weights, gradients
        update.finish()                        # K critic steps, then one policy step

The order is fixed: V_old of every trajectory comes from the critic as it was before the update, the policy's gradient
from the policy as it was before the update; the critic steps K times on the same trajectories, then the policy once.
A pass that is not finite skips the whole update: both networks are then exactly what they were at `begin`.

Letters: T tokens of one trajectory, prompt included; A its action tokens, in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from sao.config.schema import RunConfig
from services.trainer.backends.base import TrainingBackend
from services.trainer.core.critic import ValueWindow
from services.trainer.core.dis import DisStats, importance_weights
from services.trainer.core.gae import length_adaptive_lambda, skip_observation_gae
from services.trainer.core.losses import critic_loss_sum, entropy_sum, k3_estimate, policy_loss_sum, reference_kl_sum
from services.trainer.core.metrics import TokenRecord, bounded_ratio, defined, token_metrics


@dataclass(frozen=True)
class UpdateSettings:
    """The hyper-parameters of docs/algorithm.md; sao.config.schema documents each."""

    eps_low: float = 0.3
    eps_high: float = 5.0
    gamma: float = 1.0
    alpha: float = 1.5
    lambda_critic: float = 1.0
    critic_updates: int = 2
    loss_aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    advantage_norm: Literal["none", "whiten"] = "none"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    max_lag: int = 4
    explained_variance_window: int = 64

    @classmethod
    def of(cls, config: RunConfig) -> UpdateSettings:
        """The settings a run file asks for."""
        trainer, critic = config.trainer, config.critic
        return cls(
            eps_low=trainer.eps_low,
            eps_high=trainer.eps_high,
            gamma=trainer.gamma,
            alpha=trainer.alpha,
            lambda_critic=trainer.lambda_critic,
            critic_updates=critic.updates_per_policy_update,
            loss_aggregation=trainer.loss_aggregation,
            advantage_norm=trainer.advantage_norm,
            kl_coef=trainer.kl_coef,
            entropy_coef=trainer.entropy_coef,
            max_lag=trainer.max_lag,
            explained_variance_window=critic.explained_variance_window,
        )


@dataclass(frozen=True)
class TrajectoryTensors:
    """One scored trajectory as the update reads it (any device; moved to the backend's)."""

    tokens_T: Tensor
    """[T] int64."""
    action_mask_T: Tensor
    """[T] bool; False at 0."""
    logp_rollout_T: Tensor
    """[T] float32, the engine's log-probs on action tokens, 0 elsewhere."""
    lag_T: Tensor
    """[T] int64, lag in updates of each action token at consumption, 0 elsewhere."""
    reward: float

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens, mask, rollout log-probs and lags on `device`; ValueError when the shapes or the mask cannot be."""
        shapes = sorted({tuple(x.shape) for x in (self.tokens_T, self.action_mask_T, self.logp_rollout_T, self.lag_T)})
        if len(shapes) != 1 or len(shapes[0]) != 1 or shapes[0][0] < 2:
            msg = f"trajectory tensors of shapes {shapes}: expected one shape [T] with T >= 2"
            raise ValueError(msg)
        if bool(self.action_mask_T[0]):
            msg = "the first token is an action: expected a prompt token, nothing conditions the first log-prob"
            raise ValueError(msg)
        return (
            self.tokens_T.to(device),
            self.action_mask_T.to(device),
            self.logp_rollout_T.to(device),
            self.lag_T.to(device),
        )

    @classmethod
    def dummy(cls) -> TrajectoryTensors:
        """Two tokens without an action: what a rank without work accumulates, to no effect."""
        zeros_T = torch.zeros(2, dtype=torch.int64)
        return cls(zeros_T, zeros_T.bool(), zeros_T.float(), zeros_T, 0.0)


@dataclass(frozen=True)
class TrajectoryStats:
    """What the update computed from one trajectory, on the CPU, over its A action tokens in order."""

    reward: float
    lag: int
    values_A: Tensor
    advantages_A: Tensor
    """As used; with whitening, only what `finish` returns is."""
    returns_A: Tensor
    ratios_A: Tensor
    """Importance ratios before masking, finite (log-ratio clamped to +-30; NaN where not finite)."""
    weights_A: Tensor
    """f(r) each token carried, 0 where rejected."""


@dataclass(frozen=True)
class UpdateStats:
    """One finished update."""

    skipped: bool
    """A pass was not finite: nothing was changed."""
    skipped_reason: str
    critic_only: bool
    trajectories: list[TrajectoryStats]
    metrics: dict[str, float]


class Update:
    """The algorithm against one backend; the module's head shows the order of calls.

    On several ranks each has its own `Update` and calls the same methods equally often, with its share of the
    trajectories and dummies to fill up; denominators, decisions and steps are common, stats are of the rank's share.
    """

    def __init__(self, backend: TrainingBackend, settings: UpdateSettings) -> None:
        self._backend = backend
        self._settings = settings
        self._window = ValueWindow(settings.explained_variance_window)
        self._kept: list[_Kept] = []
        self._critic_only = False
        self._open = False

    def recall(self, values: Sequence[float], reward: float) -> None:
        """Put a trajectory of an earlier life, by its action tokens' values, into the explained-variance window."""
        values_A = torch.tensor(values)
        everywhere_A = torch.ones_like(values_A, dtype=torch.bool)
        settings = self._settings
        _, returns_A = skip_observation_gae(values_A, everywhere_A, reward, settings.gamma, settings.lambda_critic)
        self._window.append(values_A, returns_A)

    def begin(self, *, critic_only: bool = False) -> None:
        """Start an update; `critic_only` leaves the policy alone (critic warm-up, value pre-training)."""
        self._backend.begin_update()
        self._kept = []
        self._critic_only = critic_only
        self._open = True

    def accumulate(self, trajectory: TrajectoryTensors) -> TrajectoryStats:
        """Consume one trajectory: V_old, advantages, importance weights, and the gradients of both networks."""
        self._expect_open("accumulate")
        backend, settings = self._backend, self._settings
        tokens_T, mask_T, logp_rollout_T, lag_T = trajectory.on(backend.device)
        n_actions = int(mask_T.sum())

        # V_old, and critic pass 1 on the same graph.
        values_T = backend.critic_forward(tokens_T)
        _, returns_T = skip_observation_gae(values_T, mask_T, trajectory.reward, settings.gamma, settings.lambda_critic)
        critic_loss = critic_loss_sum(values_T, returns_T, mask_T)
        backend.critic_backward(critic_loss)

        # Advantages over action tokens only, lambda by length.
        lam = length_adaptive_lambda(max(n_actions, 1), settings.alpha)
        advantages_T, _ = skip_observation_gae(values_T, mask_T, trajectory.reward, settings.gamma, lam)

        # Importance weights; with whitening the policy's backward waits for the moments of the whole update.
        deferred = self._critic_only or settings.advantage_norm == "whiten"
        policy = backend.policy_evaluate(tokens_T) if deferred else backend.policy_forward(tokens_T)
        stale_T = mask_T & (lag_T > settings.max_lag)
        weight_T, dis = importance_weights(
            policy.logp_T, logp_rollout_T, mask_T, settings.eps_low, settings.eps_high, stale_T
        )
        reference_T = backend.reference_logp(tokens_T) if settings.kl_coef > 0 and not self._critic_only else None
        kept = _Kept(tokens_T, mask_T, returns_T, advantages_T, weight_T, stale_T, reference_T)
        kept.critic_loss = float(critic_loss.detach())
        if not deferred:
            kept.policy_loss = self._policy_pass(kept, policy.logp_T, policy.entropy_T, advantages_T)

        kept.record = TokenRecord(
            dis=_on_cpu(dis),
            lag_A=lag_T[mask_T].cpu(),
            values_A=values_T.detach()[mask_T].cpu(),
            entropy_A=policy.entropy_T.detach()[mask_T].cpu(),
            kl_reference_A=None if reference_T is None else _reference_kl(policy.logp_T, reference_T, mask_T),
            reward=trajectory.reward,
        )
        kept.stats = TrajectoryStats(
            reward=trajectory.reward,
            lag=int(lag_T[mask_T].max()) if n_actions else 0,
            values_A=kept.record.values_A,
            advantages_A=advantages_T[mask_T].cpu(),
            returns_A=returns_T[mask_T].cpu(),
            ratios_A=bounded_ratio(kept.record.dis.log_ratio_A),
            weights_A=weight_T[mask_T].cpu(),
        )
        self._kept.append(kept)
        return kept.stats

    def finish(self) -> UpdateStats:
        """K critic steps on the kept trajectories, then the policy's step.

        ValueError when no rank has accumulated an action token. The update is closed afterwards, skipped or not.
        """
        self._expect_open("finish")
        self._open = False
        backend, settings = self._backend, self._settings
        n_actions, n_trajectories = backend.sum_over_ranks(
            [sum(len(k.stats.values_A) for k in self._kept), sum(len(k.stats.values_A) > 0 for k in self._kept)]
        )
        if n_actions == 0:
            msg = "an update needs at least one action token, found none on any rank: accumulate a trajectory first"
            raise ValueError(msg)
        if settings.advantage_norm == "whiten":
            self._whitened_policy_passes(n_actions)

        norms: dict[str, float] = {}
        reason = self._steps(n_actions, n_trajectories, norms)
        if reason:
            backend.begin_update()
        return self._close(reason, norms)

    def _steps(self, n_actions: float, n_trajectories: float, norms: dict[str, float]) -> str:
        """Critic K times, then the policy; why the update had to be skipped, or nothing."""
        backend, settings = self._backend, self._settings
        if self._any_rank(not all(k.finite for k in self._kept)):
            return "loss of the first pass is not finite"

        backend.snapshot_critic()
        for k in range(settings.critic_updates):
            finite = True
            if k > 0:
                # The same trajectories with the same targets: only V is read again.
                for kept in self._kept:
                    loss = critic_loss_sum(backend.critic_forward(kept.tokens_T), kept.returns_T, kept.mask_T)
                    backend.critic_backward(loss)
                    finite &= math.isfinite(float(loss.detach()))
            if self._any_rank(not finite):
                backend.restore_critic()
                return f"loss of critic pass {k + 1} is not finite"
            norm = backend.critic_step(n_actions)
            norms.setdefault("critic_grad_norm", norm)
            if not math.isfinite(norm):
                backend.restore_critic()
                return f"gradient of critic pass {k + 1} is not finite"

        if self._critic_only:
            return ""
        norm = backend.policy_step(n_actions if settings.loss_aggregation == "token_mean" else n_trajectories)
        norms["policy_grad_norm"] = norm
        if not math.isfinite(norm):
            backend.restore_critic()
            return "gradient of the policy is not finite"
        return ""

    def _policy_pass(self, kept: _Kept, logp_T: Tensor, entropy_T: Tensor, advantages_T: Tensor) -> float:
        """Backward of one trajectory's policy loss sum, KL and entropy terms included; its value."""
        settings = self._settings
        loss = policy_loss_sum(logp_T, kept.weight_T, advantages_T)
        fresh_T = kept.mask_T & ~kept.stale_T  # a stale token moves the policy by no term at all
        if kept.reference_T is not None:
            loss = loss + settings.kl_coef * reference_kl_sum(logp_T, kept.reference_T, fresh_T)
        if settings.entropy_coef > 0:
            loss = loss - settings.entropy_coef * entropy_sum(entropy_T, fresh_T)
        if settings.loss_aggregation == "sequence_mean":
            loss = loss / max(int(kept.mask_T.sum()), 1)
        self._backend.policy_backward(loss)
        return float(loss.detach())

    def _whitened_policy_passes(self, n_actions: float) -> None:
        """Policy passes with advantages of mean 0 and deviation 1 over the action tokens of the whole update."""
        advantages_N = torch.cat([kept.advantages_T[kept.mask_T] for kept in self._kept]).double()
        (total,) = self._backend.sum_over_ranks([float(advantages_N.sum())])
        mean = total / n_actions
        (square,) = self._backend.sum_over_ranks([float((advantages_N - mean).square().sum())])
        deviation = math.sqrt(square / n_actions) + 1e-8
        for kept in self._kept:
            kept.advantages_T = torch.where(kept.mask_T, (kept.advantages_T - mean) / deviation, 0.0)
            kept.stats = replace(kept.stats, advantages_A=kept.advantages_T[kept.mask_T].cpu())
            if not self._critic_only:
                policy = self._backend.policy_forward(kept.tokens_T)
                kept.policy_loss = self._policy_pass(kept, policy.logp_T, policy.entropy_T, kept.advantages_T)

    def _close(self, reason: str, norms: dict[str, float]) -> UpdateStats:
        real = [kept for kept in self._kept if len(kept.stats.values_A)]
        self._kept = []
        numbers = token_metrics([kept.record for kept in real]) if real else {}
        tokens = max(sum(len(kept.stats.values_A) for kept in real), 1)
        for kept in real:
            self._window.append(kept.stats.values_A, kept.stats.returns_A)
        numbers |= defined(
            norms
            | {
                "critic_loss": sum(kept.critic_loss for kept in real) / tokens,
                "explained_variance": self._window.explained_variance(),
                "update_skipped": float(bool(reason)),
            }
        )
        if not self._critic_only:
            share = tokens if self._settings.loss_aggregation == "token_mean" else max(len(real), 1)
            numbers |= defined({"policy_loss": sum(kept.policy_loss for kept in real) / share})
        return UpdateStats(bool(reason), reason, self._critic_only, [kept.stats for kept in real], numbers)

    def _any_rank(self, flag: bool) -> bool:
        return self._backend.sum_over_ranks([float(flag)])[0] > 0

    def _expect_open(self, call: str) -> None:
        if not self._open:
            msg = f"{call}() outside an update: call begin() first"
            raise RuntimeError(msg)


@dataclass
class _Kept:
    """A trajectory kept until the end of its update: the critic reads it again, whitening waits for its advantages."""

    tokens_T: Tensor
    mask_T: Tensor
    returns_T: Tensor
    advantages_T: Tensor
    weight_T: Tensor
    stale_T: Tensor
    reference_T: Tensor | None
    critic_loss: float = 0.0
    policy_loss: float = 0.0
    record: TokenRecord = field(init=False)
    stats: TrajectoryStats = field(init=False)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.critic_loss) and math.isfinite(self.policy_loss)


def _on_cpu(dis: DisStats) -> DisStats:
    return DisStats(dis.log_ratio_A.cpu(), dis.verdict_A.cpu())


def _reference_kl(logp_T: Tensor, reference_T: Tensor, mask_T: Tensor) -> Tensor:
    return k3_estimate(reference_T[mask_T] - logp_T.detach()[mask_T]).cpu()
