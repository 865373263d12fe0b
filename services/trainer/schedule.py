"""Which networks the next update trains and at what learning rates: the critic alone at first, then both.

    PRETRAIN   critic only, on rollouts of the initial policy, until its explained variance passes the gate or it has
               had its share of trajectories
    WARMUP     critic only, its learning rate rising linearly
    TRAIN      K critic steps, then the policy's

V_old of a trajectory is read before the critic trains on it, so the explained variance of the running window is that of
held-out data; it is judged once the window is full of them. Everything here is a function of counts and explained
variances: the same updates give the same phases, in whatever lives of the process they were made.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pydantic import BaseModel, ConfigDict

from sao.config.schema import RunConfig


class Phase(Enum):
    PRETRAIN = "pretrain"
    WARMUP = "warmup"
    TRAIN = "train"


class Gate(Enum):
    """How the critic's pre-training ended."""

    OPEN = "open"
    """It goes on."""
    PASSED = "passed"
    GAVE_UP = "gave_up"
    """It had its share of trajectories before the explained variance was there."""
    NONE = "none"
    """There was none."""


class Pretraining(BaseModel):
    """How far the critic's pre-training is; a part of each checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gate: Gate = Gate.OPEN
    updates: int = 0
    """Updates that belonged to it, of all that were critic-only."""
    trajectories: int = 0


@dataclass(frozen=True)
class Plan:
    """What the next update does."""

    phase: Phase
    policy_lr: float
    critic_lr: float

    @property
    def critic_only(self) -> bool:
        """Whether the policy stays as it is."""
        return self.phase is not Phase.TRAIN


@dataclass(frozen=True)
class Schedule:
    """The settings of the three phases."""

    policy_lr: float
    critic_lr: float
    pretrain_trajectories: int
    """The most that pre-training takes; 0: there is none."""
    gate: float
    """Explained variance that ends it."""
    window: int
    """Trajectories before which it is not judged."""
    warmup_updates: int

    @classmethod
    def of(cls, config: RunConfig, *, has_critic: bool) -> Schedule:
        """The phases a run file asks for; without a critic there is nothing but training."""
        trainer, critic = config.trainer, config.critic
        return cls(
            policy_lr=trainer.policy_lr,
            critic_lr=critic.lr,
            pretrain_trajectories=critic.pretrain_trajectories if has_critic else 0,
            gate=critic.pretrain_explained_variance,
            # The window is rank 0's, which sees one trajectory in `ranks`.
            window=critic.explained_variance_window * trainer.ranks,
            warmup_updates=critic.warmup_updates if has_critic else 0,
        )

    def resumed(self, pretraining: Pretraining) -> Pretraining:
        """`pretraining` as a process that starts finds it: over, where these settings give it no trajectory more."""
        if pretraining.gate is not Gate.OPEN or pretraining.trajectories < self.pretrain_trajectories:
            return pretraining
        return pretraining.model_copy(update={"gate": Gate.GAVE_UP if pretraining.trajectories else Gate.NONE})

    def plan(self, update: int, critic_only: int, pretraining: Pretraining) -> Plan:
        """The next update, after `update` policy updates and `critic_only` others."""
        if update == 0 and pretraining.gate is Gate.OPEN:
            return Plan(Phase.PRETRAIN, self.policy_lr, self.critic_lr)
        warmed = critic_only - pretraining.updates
        if update == 0 and warmed < self.warmup_updates:
            return Plan(Phase.WARMUP, self.policy_lr, self.critic_lr * (warmed + 1) / self.warmup_updates)
        return Plan(Phase.TRAIN, self.policy_lr, self.critic_lr)

    def after(self, pretraining: Pretraining, trajectories: int, explained_variance: float | None) -> Pretraining:
        """`pretraining` after one more of its updates; `explained_variance` of the window, None where undefined."""
        seen = pretraining.trajectories + trajectories
        gate = Gate.OPEN
        if seen >= self.window and explained_variance is not None and explained_variance >= self.gate:
            gate = Gate.PASSED
        elif seen >= self.pretrain_trajectories:
            gate = Gate.GAVE_UP
        return Pretraining(gate=gate, updates=pretraining.updates + 1, trajectories=seen)

    def told(self, phase: Phase, critic_only: int, pretraining: Pretraining, explained_variance: float | None) -> str:
        """How far the critic is after an update of this phase, for people; nothing once the policy trains."""
        if phase is Phase.TRAIN:
            return ""
        if phase is Phase.WARMUP:
            return f"critic warm-up {critic_only - pretraining.updates}/{self.warmup_updates}"
        found = "undefined" if explained_variance is None else f"{explained_variance:.2f}"
        measured = f"explained variance {found} of {self.gate:g}"
        if pretraining.gate is not Gate.OPEN:
            end = pretraining.gate.value.replace("_", " ")
            return f"critic pre-training {end} after {pretraining.trajectories} trajectories, {measured}"
        judged = "" if pretraining.trajectories >= self.window else f", judged from {self.window} on"
        return f"critic pre-training {pretraining.trajectories}/{self.pretrain_trajectories}, {measured}{judged}"
