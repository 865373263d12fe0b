"""One update of any algorithm; of SAO, in the order of its paper (arXiv 2607.07508, section 3; docs/algorithm.md).

    update = Update(backend, settings)
    forever:
        update.begin(critic_only=...)
        for each trajectory, as it arrives:
            update.accumulate(trajectory)      # V_old, advantages, importance weights, gradients
        update.finish()                        # K critic steps, then one policy step

The order is fixed: V_old of every trajectory comes from the critic as it was before the update, the policy's gradient
from the policy as it was before the update; the critic steps K times on the same trajectories, then the policy once.
A pass that is not finite skips the whole update: both networks are then exactly what they were at `begin`.

Algorithms differ in two places. Advantages come from the critic, or with the trajectory (a baseline of rewards, which
is not this module's business). The weight of a token is f(r) of DIS, or the clipped ratio of PPO.
What needs the whole update first (whitening, minibatches) makes its policy passes in `finish`.

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
from services.trainer.backends.base import PolicyOutput, TrainingBackend
from services.trainer.core.critic import ValueWindow
from services.trainer.core.dis import DisStats, importance_weights
from services.trainer.core.gae import length_adaptive_lambda, skip_observation_gae
from services.trainer.core.losses import (
    critic_loss_sum,
    entropy_sum,
    k3_estimate,
    negative_log_likelihood_sum,
    policy_loss_sum,
    reference_kl_sum,
)
from services.trainer.core.metrics import TokenRecord, bounded_ratio, defined, token_metrics
from services.trainer.core.ppo import clipped_weights


@dataclass(frozen=True)
class UpdateSettings:
    """The hyper-parameters of docs/algorithm.md; sao.config.schema documents each."""

    has_critic: bool = True
    loss: Literal["dis", "ppo"] = "dis"
    eps_low: float = 0.3
    eps_high: float = 5.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    ppo_old: Literal["batch_start", "rollout"] = "batch_start"
    minibatches: int = 1
    gamma: float = 1.0
    alpha: float = 1.5
    lambda_critic: float = 1.0
    critic_updates: int = 2
    loss_aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    advantage_norm: Literal["none", "whiten"] = "none"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    nll_coef: float = 0.0
    max_lag: int = 4
    explained_variance_window: int = 64

    @classmethod
    def of(cls, config: RunConfig) -> UpdateSettings:
        """The settings a run file asks for."""
        trainer, critic = config.trainer, config.critic
        return cls(
            has_critic=config.algorithm.has_critic,
            loss=config.algorithm.loss,
            eps_low=trainer.eps_low,
            eps_high=trainer.eps_high,
            clip_low=config.ppo.clip_low,
            clip_high=config.ppo.clip_high,
            ppo_old=config.ppo.old,
            minibatches=config.ppo.minibatches,
            gamma=trainer.gamma,
            alpha=trainer.alpha,
            lambda_critic=trainer.lambda_critic,
            critic_updates=critic.updates_per_policy_update,
            loss_aggregation=trainer.loss_aggregation,
            advantage_norm=trainer.advantage_norm,
            kl_coef=trainer.kl_coef,
            entropy_coef=trainer.entropy_coef,
            nll_coef=trainer.nll_coef,
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
    advantage: float | None = None
    """Of every action token, where the algorithm has no critic to tell."""
    copies: int = 1
    """How often it counts: above 1 where it also stands for members of its group that failed."""
    routes_TLK: Tensor | None = None
    """[T - 1, layers, experts per token] uint8, the experts to replay (sao.routing); None: the own routers choose."""

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
        return cls(zeros_T, zeros_T.bool(), zeros_T.float(), zeros_T, 0.0, advantage=0.0)


@dataclass(frozen=True)
class TrajectoryStats:
    """What the update computed from one trajectory, on the CPU, over its A action tokens in order."""

    reward: float
    lag: int
    values_A: Tensor
    """Like `returns_A`, empty where there is no critic."""
    advantages_A: Tensor
    """As used; where policy passes wait for the whole update, only what `finish` returns is."""
    returns_A: Tensor
    ratios_A: Tensor
    """Ratios to the rollout before masking, finite (log-ratio clamped to +-30; NaN where not finite)."""
    weights_A: Tensor
    """What each token carried: f(r), or PPO's unclipped ratio; 0 where rejected."""


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
        if not self._settings.has_critic:
            return
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
        kept = _Kept(trajectory, tokens_T, mask_T, logp_rollout_T, stale_T=mask_T & (lag_T > settings.max_lag))

        # V_old, critic pass 1 on the same graph, and the advantages that follow.
        if settings.has_critic:
            self._critic_pass(kept)
        else:
            self._given_advantage(kept)

        # Importance weights and the policy's gradient, unless it has to wait for the rest of the update.
        if settings.kl_coef > 0 and not self._critic_only:
            kept.reference_T = backend.reference_logp(tokens_T)
        deferred = self._critic_only or self._policy_waits
        forward = backend.policy_evaluate if deferred else backend.policy_forward
        policy = forward(tokens_T, trajectory.routes_TLK)
        kept.logp_old_T = logp_rollout_T if settings.ppo_old == "rollout" else policy.logp_T.detach()
        if deferred:
            self._weigh(kept, policy.logp_T)
        else:
            self._policy_pass(kept, policy)

        kept.record = TokenRecord(
            dis=kept.dis,
            lag_A=lag_T[mask_T].cpu(),
            values_A=kept.values_A,
            entropy_A=policy.entropy_T.detach()[mask_T].cpu(),
            kl_reference_A=None if kept.reference_T is None else _reference_kl(policy.logp_T, kept.reference_T, mask_T),
            reward=trajectory.reward,
            routing_disagreement_A=_on_actions(policy.routing_disagreement_T, mask_T),
        )
        self._kept.append(kept)
        return kept.stats()

    def finish(self) -> UpdateStats:
        """K critic steps on the kept trajectories, then the policy's.

        ValueError when no rank has accumulated an action token. The update is closed afterwards, skipped or not.
        """
        self._expect_open("finish")
        self._open = False
        n_actions, n_trajectories = self._counts(self._kept)
        if n_actions == 0:
            msg = "an update needs at least one action token, found none on any rank: accumulate a trajectory first"
            raise ValueError(msg)
        if self._settings.advantage_norm == "whiten":
            self._whiten(n_actions)

        norms: dict[str, float] = {}
        reason = self._steps(n_actions, n_trajectories, norms)
        if reason:
            self._backend.begin_update()
        return self._close(reason, norms)

    @property
    def _policy_waits(self) -> bool:
        return self._settings.advantage_norm == "whiten" or self._settings.minibatches > 1

    def _critic_pass(self, kept: _Kept) -> None:
        """V_old, the critic's targets and gradient, and GAE over action tokens with lambda by length."""
        settings, mask_T, reward = self._settings, kept.mask_T, kept.trajectory.reward
        values_T = self._backend.critic_forward(kept.tokens_T)
        _, kept.returns_T = skip_observation_gae(values_T, mask_T, reward, settings.gamma, settings.lambda_critic)
        critic_loss = critic_loss_sum(values_T, kept.returns_T, mask_T) * kept.trajectory.copies
        self._backend.critic_backward(critic_loss)
        kept.critic_loss = float(critic_loss.detach())

        lam = length_adaptive_lambda(max(kept.n_actions, 1), settings.alpha)
        kept.advantages_T, _ = skip_observation_gae(values_T, mask_T, reward, settings.gamma, lam)
        kept.values_A = values_T.detach()[mask_T].cpu()

    def _given_advantage(self, kept: _Kept) -> None:
        """The one number that came with the trajectory, on each of its action tokens."""
        if kept.trajectory.advantage is None:
            msg = "a trajectory without an advantage, and no critic to tell it: expected TrajectoryTensors.advantage"
            raise ValueError(msg)
        dtype = torch.promote_types(kept.logp_rollout_T.dtype, torch.float32)
        kept.advantages_T = kept.mask_T.to(dtype) * kept.trajectory.advantage

    def _weigh(self, kept: _Kept, logp_T: Tensor) -> None:
        """The weight of every token under the policy as it is, by the algorithm's loss."""
        settings = self._settings
        kept.weight_T, dis = importance_weights(
            logp_T, kept.logp_rollout_T, kept.mask_T, settings.eps_low, settings.eps_high, kept.stale_T
        )
        if settings.loss == "ppo":
            kept.weight_T, verdict_T = clipped_weights(
                logp_T,
                kept.logp_old_T,
                kept.advantages_T,
                kept.mask_T,
                settings.clip_low,
                settings.clip_high,
                kept.stale_T,
            )
            dis = DisStats(dis.log_ratio_A, verdict_T[kept.mask_T])
        kept.dis = DisStats(dis.log_ratio_A.cpu(), dis.verdict_A.cpu())

    def _policy_pass(self, kept: _Kept, policy: PolicyOutput) -> None:
        """Weights, and the gradient of one trajectory's policy loss sum, KL, entropy and likelihood terms included."""
        settings = self._settings
        self._weigh(kept, policy.logp_T)
        loss = policy_loss_sum(policy.logp_T, kept.weight_T, kept.advantages_T)
        fresh_T = kept.mask_T & ~kept.stale_T  # a stale token moves the policy by no term at all
        if kept.reference_T is not None:
            loss = loss + settings.kl_coef * reference_kl_sum(policy.logp_T, kept.reference_T, fresh_T)
        if settings.entropy_coef > 0:
            loss = loss - settings.entropy_coef * entropy_sum(policy.entropy_T, fresh_T)
        if settings.nll_coef > 0 and kept.trajectory.reward >= 1:
            loss = loss + settings.nll_coef * negative_log_likelihood_sum(policy.logp_T, fresh_T)
        loss = loss * kept.trajectory.copies
        if settings.loss_aggregation == "sequence_mean":
            loss = loss / max(kept.n_actions, 1)
        self._backend.policy_backward(loss)
        kept.policy_loss = float(loss.detach())

    def _whiten(self, n_actions: float) -> None:
        """Advantages of mean 0 and deviation 1 over the action tokens of the whole update."""
        advantages_N = torch.cat([kept.advantages_T[kept.mask_T] for kept in self._kept]).double()
        copies_N = torch.cat([torch.full((kept.n_actions,), float(kept.trajectory.copies)) for kept in self._kept])
        copies_N = copies_N.to(advantages_N)
        (total,) = self._backend.sum_over_ranks([float((copies_N * advantages_N).sum())])
        mean = total / n_actions
        (square,) = self._backend.sum_over_ranks([float((copies_N * (advantages_N - mean).square()).sum())])
        deviation = math.sqrt(square / n_actions) + 1e-8
        for kept in self._kept:
            kept.advantages_T = torch.where(kept.mask_T, (kept.advantages_T - mean) / deviation, 0.0)

    def _steps(self, n_actions: float, n_trajectories: float, norms: dict[str, float]) -> str:
        """Critic K times, then the policy; why the update had to be skipped, or nothing."""
        if self._any_rank(not all(k.finite for k in self._kept)):
            return "loss of the first pass is not finite"
        if self._settings.has_critic:
            self._backend.snapshot_critic()
        reason = self._critic_steps(n_actions, norms) if self._settings.has_critic else ""
        if not reason and not self._critic_only:
            reason = self._policy_steps(n_actions, n_trajectories, norms)
        if reason and self._settings.has_critic:
            self._backend.restore_critic()
        return reason

    def _critic_steps(self, n_actions: float, norms: dict[str, float]) -> str:
        backend = self._backend
        for k in range(self._settings.critic_updates):
            finite = True
            if k > 0:
                # The same trajectories with the same targets: only V is read again.
                for kept in self._kept:
                    loss = critic_loss_sum(backend.critic_forward(kept.tokens_T), kept.returns_T, kept.mask_T)
                    backend.critic_backward(loss * kept.trajectory.copies)
                    finite &= math.isfinite(float(loss.detach()))
            if self._any_rank(not finite):
                return f"loss of critic pass {k + 1} is not finite"
            norm = backend.critic_step(n_actions)
            norms.setdefault("critic_grad_norm", norm)
            if not math.isfinite(norm):
                return f"gradient of critic pass {k + 1} is not finite"
        return ""

    def _policy_steps(self, n_actions: float, n_trajectories: float, norms: dict[str, float]) -> str:
        """One step, or one for each minibatch; the policy is whole again when any of them is not finite."""
        if not self._policy_waits:
            return self._policy_step(n_actions, n_trajectories, norms)
        several = self._settings.minibatches > 1
        if several:
            self._backend.snapshot_policy()
        size = -(-len(self._kept) // self._settings.minibatches)
        for first in range(0, len(self._kept), size):
            part = self._kept[first : first + size]
            for kept in part:
                self._policy_pass(kept, self._backend.policy_forward(kept.tokens_T, kept.trajectory.routes_TLK))
            counts = self._counts(part)
            if self._any_rank(not all(kept.finite for kept in part)):
                reason = "loss of the policy is not finite"
            else:
                reason = self._policy_step(*counts, norms) if counts[0] > 0 else ""
            if reason:
                if several:
                    self._backend.restore_policy()
                return reason
        return ""

    def _policy_step(self, n_actions: float, n_trajectories: float, norms: dict[str, float]) -> str:
        by_token = self._settings.loss_aggregation == "token_mean"
        norm = self._backend.policy_step(n_actions if by_token else n_trajectories)
        norms.setdefault("policy_grad_norm", norm)
        return "" if math.isfinite(norm) else "gradient of the policy is not finite"

    def _counts(self, part: Sequence[_Kept]) -> tuple[float, float]:
        """Action tokens and trajectories that have any, copies included, over all ranks."""
        actions = sum(kept.n_actions * kept.trajectory.copies for kept in part)
        trajectories = sum(kept.trajectory.copies for kept in part if kept.n_actions)
        n_actions, n_trajectories = self._backend.sum_over_ranks([actions, trajectories])
        return n_actions, n_trajectories

    def _close(self, reason: str, norms: dict[str, float]) -> UpdateStats:
        real = [kept for kept in self._kept if kept.n_actions]
        self._kept = []
        for kept in real:
            kept.record = replace(kept.record, dis=kept.dis)
        numbers = token_metrics([kept.record for kept in real]) if real else {}
        tokens = max(sum(kept.n_actions * kept.trajectory.copies for kept in real), 1)
        numbers |= defined(norms | {"update_skipped": float(bool(reason))})
        if self._settings.has_critic:
            for kept in real:
                self._window.append(kept.values_A, kept.returns_T[kept.mask_T].cpu())
            critic_loss = sum(kept.critic_loss for kept in real) / tokens
            numbers |= defined({"critic_loss": critic_loss, "explained_variance": self._window.explained_variance()})
        if not self._critic_only:
            sequences = max(sum(kept.trajectory.copies for kept in real), 1)
            share = tokens if self._settings.loss_aggregation == "token_mean" else sequences
            numbers |= defined({"policy_loss": sum(kept.policy_loss for kept in real) / share})
        return UpdateStats(bool(reason), reason, self._critic_only, [kept.stats() for kept in real], numbers)

    def _any_rank(self, flag: bool) -> bool:
        return self._backend.sum_over_ranks([float(flag)])[0] > 0

    def _expect_open(self, call: str) -> None:
        if not self._open:
            msg = f"{call}() outside an update: call begin() first"
            raise RuntimeError(msg)


@dataclass
class _Kept:
    """A trajectory kept until the end of its update: the critic reads it again, and the policy may have to wait."""

    trajectory: TrajectoryTensors
    tokens_T: Tensor
    mask_T: Tensor
    logp_rollout_T: Tensor
    stale_T: Tensor
    reference_T: Tensor | None = None
    values_A: Tensor = field(default_factory=lambda: torch.zeros(0))
    returns_T: Tensor = field(init=False)
    advantages_T: Tensor = field(init=False)
    logp_old_T: Tensor = field(init=False)
    weight_T: Tensor = field(init=False)
    dis: DisStats = field(init=False)
    record: TokenRecord = field(init=False)
    critic_loss: float = 0.0
    policy_loss: float = 0.0

    def __post_init__(self) -> None:
        self.n_actions = int(self.mask_T.sum())

    @property
    def finite(self) -> bool:
        return math.isfinite(self.critic_loss) and math.isfinite(self.policy_loss)

    def stats(self) -> TrajectoryStats:
        """As things stand."""
        return TrajectoryStats(
            reward=self.trajectory.reward,
            lag=int(self.record.lag_A.max()) if self.n_actions else 0,
            values_A=self.values_A,
            advantages_A=self.advantages_T[self.mask_T].cpu(),
            returns_A=self.returns_T[self.mask_T].cpu() if len(self.values_A) else self.values_A,
            ratios_A=bounded_ratio(self.dis.log_ratio_A),
            weights_A=self.weight_T[self.mask_T].cpu(),
        )


def _on_actions(x_T: Tensor | None, mask_T: Tensor) -> Tensor | None:
    return None if x_T is None else x_T[mask_T].cpu()


def _reference_kl(logp_T: Tensor, reference_T: Tensor, mask_T: Tensor) -> Tensor:
    return k3_estimate(reference_T[mask_T] - logp_T.detach()[mask_T]).cpu()
