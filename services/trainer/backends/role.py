"""One trained network behind the backend: what the plain-torch and the DeepSpeed kind have in common to offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state per parameter; its step counter is one number for all of them."""


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW and clipping, the same for every kind of backend."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    gradient_clip: float


@dataclass(frozen=True)
class RoleState:
    """All that training continues from, whole tensors on the CPU by parameter name."""

    weights: Mapping[str, Tensor]
    """Trained parameters in the precision they are stepped in, frozen ones as they are."""
    moments: Mapping[str, Mapping[str, Tensor]]
    """Moment name to tensor by trained parameter; zeros before the first step."""
    step: int


class Role(Protocol):
    """A module with its optimiser; gradients accumulate between `begin` and `step`."""

    @property
    def module(self) -> nn.Module: ...

    def __call__(self, *inputs: Tensor) -> Any:  # noqa: ANN401 - whatever the module's forward gives
        """The module's forward, with graph."""

    def begin(self) -> None:
        """Drop the accumulated gradient."""

    def backward(self, loss_sum: Tensor) -> None: ...

    def step(self, denominator: float) -> float:
        """TrainingBackend.policy_step, for this module."""

    def set_lr(self, lr: float) -> None: ...

    def snapshot(self) -> None: ...

    def restore(self) -> None: ...

    def module_state(self) -> dict[str, Tensor]:
        """Whole parameters in the module's own precision, on the CPU."""

    def state(self) -> RoleState: ...

    def load_state(self, state: RoleState) -> None:
        """Names and shapes have been compared already."""

    def shapes(self) -> dict[str, tuple[torch.Size, bool]]:
        """Whole shape of each parameter, and whether it trains."""


def new_adamw(module: nn.Module, options: OptimizerOptions) -> torch.optim.AdamW:
    """AdamW over the trained parameters; fused: four times faster on a CPU, and nothing is compiled for it."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        parameters, lr=options.lr, betas=options.betas, weight_decay=options.weight_decay, fused=True
    )


def ensure_moments(optimizer: torch.optim.Optimizer, tensor: Tensor) -> dict[str, Any]:
    """The optimiser's state of one tensor, created as AdamW would at its first step where there is none."""
    state: dict[str, Any] = optimizer.state[tensor]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        for name in MOMENTS:
            state[name] = torch.zeros_like(tensor)
    return state


class TensorSnapshot:
    """Copies of stepped tensors and of their optimiser state, to be written back in place."""

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: list[Tensor]) -> None:
        self._optimizer = optimizer
        self._saved = [
            (tensor, tensor.detach().clone(), {k: v.clone() for k, v in ensure_moments(optimizer, tensor).items()})
            for tensor in tensors
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, weights, state in self._saved:
            tensor.copy_(weights)
            for name, value in state.items():
                self._optimizer.state[tensor][name].copy_(value)
