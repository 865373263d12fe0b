"""The backend in plain torch, one process: what every other kind is compared with, and the twin for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sao.config.schema import RunConfig
from services.trainer.backends.base import BackendError
from services.trainer.backends.paired import PairedBackend, optimizer_options
from services.trainer.backends.role import (
    MOMENTS,
    OptimizerOptions,
    RoleState,
    TensorSnapshot,
    ensure_moments,
    new_adamw,
)
from services.trainer.models import CriticModule, PolicyModule


class TorchRole:
    """A module, its AdamW and global-norm clipping."""

    def __init__(self, module: nn.Module, options: OptimizerOptions) -> None:
        self.module = module
        self._optimizer = new_adamw(module, options)
        self._clip = options.gradient_clip
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._snapshot: TensorSnapshot | None = None

    def __call__(self, *inputs: Tensor) -> Any:  # noqa: ANN401 - whatever the module's forward gives
        return self.module(*inputs)

    def begin(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def backward(self, loss_sum: Tensor) -> None:
        torch.autograd.backward(loss_sum)

    def step(self, denominator: float) -> float:
        for parameter in self._trained.values():
            if parameter.grad is not None:
                parameter.grad.div_(denominator)
        norm = nn.utils.clip_grad_norm_(self._trained.values(), self._clip)
        if torch.isfinite(norm):
            self._optimizer.step()
        self.begin()
        return float(norm)

    def set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def snapshot(self) -> None:
        self._snapshot = TensorSnapshot(self._optimizer, list(self._trained.values()))

    def restore(self) -> None:
        if self._snapshot is None:
            msg = "restore without a snapshot: call snapshot first"
            raise BackendError(msg)
        self._snapshot.restore()

    def module_state(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu().clone() for name, p in self.module.named_parameters()}

    def state(self) -> RoleState:
        states = {name: ensure_moments(self._optimizer, p) for name, p in self._trained.items()}
        moments = {key: {name: s[key].detach().cpu().clone() for name, s in states.items()} for key in MOMENTS}
        return RoleState(self.module_state(), moments, int(next(iter(states.values()))["step"]))

    @torch.no_grad()
    def load_state(self, state: RoleState) -> None:
        self.begin()
        for name, parameter in self.module.named_parameters():
            parameter.copy_(state.weights[name])
        for name, parameter in self._trained.items():
            own = ensure_moments(self._optimizer, parameter)
            own["step"].fill_(state.step)
            for key in MOMENTS:
                own[key].copy_(state.moments[key][name])

    def shapes(self) -> dict[str, tuple[torch.Size, bool]]:
        return {name: (p.shape, p.requires_grad) for name, p in self.module.named_parameters()}


class TorchReferenceBackend(PairedBackend):
    """Policy, critic and reference from one checkpoint directory, as `config` says; `dtype` for float64 proofs."""

    def __init__(self, config: RunConfig, policy_dir: Path, dtype: torch.dtype = torch.float32) -> None:
        trainer, critic = config.trainer, config.critic
        chunk = trainer.logprob_chunk
        policy = PolicyModule.load(policy_dir, dtype, chunk, replay=trainer.routing_replay, frozen=trainer.frozen)
        super().__init__(
            policy=TorchRole(policy, optimizer_options(trainer, trainer.policy_lr)),
            critic=TorchRole(CriticModule.load(policy_dir, dtype, critic.frozen), optimizer_options(trainer, critic.lr))
            if config.algorithm.has_critic
            else None,
            reference=PolicyModule.load(policy_dir, dtype, chunk) if trainer.kl_coef > 0 else None,
            device=torch.device("cpu"),
        )
