"""The contract of base.py over two roles: what is the same whatever holds the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sao.config.schema import TrainerSection
from services.trainer.backends.base import BackendError, PolicyOutput
from services.trainer.backends.role import OptimizerOptions, Role
from services.trainer.backends.saved_state import read_backend_state, write_backend_state

_POLICY_PREFIX = "model."


def optimizer_options(trainer: TrainerSection, lr: float) -> OptimizerOptions:
    """The run file's optimiser settings with one role's learning rate."""
    return OptimizerOptions(lr, trainer.betas, trainer.weight_decay, trainer.gradient_clip)


class PairedBackend:
    """A `TrainingBackend` made of a policy role, an optional critic and an optional frozen reference, on one rank."""

    def __init__(
        self,
        policy: Role,
        critic: Role | None,
        reference: nn.Module | Callable[[Tensor], tuple[Tensor, Tensor]] | None,
        device: torch.device,
    ) -> None:
        self._policy = policy
        self._critic_role = critic
        self._reference = reference
        if isinstance(reference, nn.Module):
            reference.requires_grad_(False)
        self._device = device

    @property
    def _critic(self) -> Role:
        if self._critic_role is None:
            msg = "no critic was loaded: trainer.algorithm has none"
            raise BackendError(msg)
        return self._critic_role

    @property
    def _roles(self) -> dict[str, Role]:
        critic = {} if self._critic_role is None else {"critic": self._critic_role}
        return {"policy": self._policy, **critic}

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    @property
    def device(self) -> torch.device:
        return self._device

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        return [float(value) for value in values]

    def policy_forward(self, tokens_T: Tensor, routes_TLK: Tensor | None = None) -> PolicyOutput:
        return PolicyOutput(*self._policy(*self._on_device(tokens_T, routes_TLK)))

    @torch.no_grad()
    def policy_evaluate(self, tokens_T: Tensor, routes_TLK: Tensor | None = None) -> PolicyOutput:
        return PolicyOutput(*self._policy(*self._on_device(tokens_T, routes_TLK)))

    def _on_device(self, *tensors: Tensor | None) -> list[Tensor]:
        return [tensor.to(self._device) for tensor in tensors if tensor is not None]

    @torch.no_grad()
    def reference_logp(self, tokens_T: Tensor) -> Tensor:
        if self._reference is None:
            msg = "no reference policy was loaded: trainer.kl_coef is 0"
            raise BackendError(msg)
        logp_T: Tensor = self._reference(tokens_T.to(self._device))[0]
        return logp_T

    def critic_forward(self, tokens_T: Tensor) -> Tensor:
        values_T: Tensor = self._critic(tokens_T.to(self._device))
        return values_T

    def begin_update(self) -> None:
        for role in self._roles.values():
            role.begin()

    def policy_backward(self, loss_sum: Tensor) -> None:
        self._policy.backward(loss_sum)

    def critic_backward(self, loss_sum: Tensor) -> None:
        self._critic.backward(loss_sum)

    def policy_step(self, denominator: float) -> float:
        return self._policy.step(denominator)

    def critic_step(self, denominator: float) -> float:
        return self._critic.step(denominator)

    def snapshot_critic(self) -> None:
        self._critic.snapshot()

    def restore_critic(self) -> None:
        self._critic.restore()

    def snapshot_policy(self) -> None:
        self._policy.snapshot()

    def restore_policy(self) -> None:
        self._policy.restore()

    def set_lr(self, policy: float, critic: float) -> None:
        rates = {"policy": policy, "critic": critic}
        for name, role in self._roles.items():
            role.set_lr(rates[name])

    def parameter_names_trained(self) -> dict[str, list[str]]:
        return {
            role: [_bare(name) for name, (_, trains) in it.shapes().items() if trains]
            for role, it in self._roles.items()
        }

    def policy_state(self) -> dict[str, Tensor]:
        return _whole({_bare(name): tensor for name, tensor in self._policy.module_state().items()}, "policy")

    def critic_state(self) -> dict[str, Tensor]:
        return {} if self._critic_role is None else _whole(self._critic_role.module_state(), "critic")

    def save(self, directory: Path) -> None:
        roles = {name: role.state() for name, role in self._roles.items()}
        write_backend_state(directory, roles, self.rank, self.world_size)

    def load(self, directory: Path) -> None:
        shapes = {name: role.shapes() for name, role in self._roles.items()}
        states = read_backend_state(directory, shapes, self.rank, self.world_size)
        for name, role in self._roles.items():
            role.load_state(states[name])

    def close(self) -> None:
        """Nothing was taken."""


def _bare(name: str) -> str:
    return name.removeprefix(_POLICY_PREFIX)


def _whole(tensors: dict[str, Tensor], role: str) -> dict[str, Tensor]:
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            msg = f"{role} tensor {name} is empty after gathering: a partitioned weight must never be exported"
            raise BackendError(msg)
    return tensors
