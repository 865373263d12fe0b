"""The backend boundary: two networks that can be evaluated, differentiated and stepped, and nothing about SAO.

- Losses are SUMS over tokens; what they are divided by is known only at the step, and given there once.
- Gradients accumulate from `begin_update` to the step, over calls and over ranks; no other call touches a weight.
- A step whose gradient is not finite changes nothing, drops the gradient and says so by a non-finite norm.
- `save` then `load` continues bit for bit, on the same device kind and number of ranks.
- Every method but the properties is collective: all ranks call it, in the same order. A rank without a trajectory
  calls the forwards and backwards with a zero-weight dummy.

Tensors of one trajectory have shape [T] (T tokens, prompt included, T >= 2) and lie on `device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class BackendError(Exception):
    """What a backend raises about its own state: a damaged save, an impossible setting, an empty tensor."""


class PolicyOutput(NamedTuple):
    """What the policy says about a token sequence."""

    logp_T: Tensor
    """Log-prob (nats) of token t given the tokens before it; logp_T[0] = 0."""
    entropy_T: Tensor
    """Entropy (nats) of the distribution token t was drawn from; entropy_T[0] = 0."""
    routing_disagreement_T: Tensor | None = None
    """With routes: the share of the routing decisions of the token before t in which the recorded expert is not among
    the own router's; NaN where nothing is on record, and at 0."""


class TrainingBackend(Protocol):
    """A policy, its critic (where the algorithm has one) and (with a KL term) its frozen reference."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Element-wise float64 sum over the ranks, the same on each."""

    def policy_forward(self, tokens_T: Tensor, routes_TLK: Tensor | None = None) -> PolicyOutput:
        """Log-probs and entropies with their graph.

        `routes_TLK`: [T - 1, layers, experts per token] uint8, replayed in place of the own routers' choices
        (sao.routing); ValueError when the policy was loaded without replay or the shape is another.
        """

    def policy_evaluate(self, tokens_T: Tensor, routes_TLK: Tensor | None = None) -> PolicyOutput:
        """The same without a graph: canary, statistics."""

    def reference_logp(self, tokens_T: Tensor) -> Tensor:
        """[T] log-probs under the frozen initial policy, no graph; BackendError when none was loaded."""

    def critic_forward(self, tokens_T: Tensor) -> Tensor:
        """[T] values with their graph; values_T[t] is of the state BEFORE token t (read at t - 1), values_T[0] = 0.

        Like every other call that names the critic but `critic_state`: BackendError when the algorithm has none.
        """

    def begin_update(self) -> None:
        """Drop whatever gradient is accumulated and start from zero."""

    def policy_backward(self, loss_sum: Tensor) -> None:
        """Add the gradient of a scalar loss sum over this rank's tokens."""

    def critic_backward(self, loss_sum: Tensor) -> None: ...

    def policy_step(self, denominator: float) -> float:
        """Divide the gradient by `denominator` (the same on every rank), clip, step; its norm before clipping."""

    def critic_step(self, denominator: float) -> float: ...

    def snapshot_critic(self) -> None:
        """Remember the critic's weights and optimiser state; replaces an earlier snapshot."""

    def restore_critic(self) -> None:
        """Back to the snapshot, bit for bit; BackendError without one."""

    def snapshot_policy(self) -> None:
        """The same for the policy, where an update makes several steps of it."""

    def restore_policy(self) -> None: ...

    def set_lr(self, policy: float, critic: float) -> None:
        """Learning rates of the next steps."""

    def parameter_names_trained(self) -> dict[str, list[str]]:
        """Names of the trained parameters by role ("policy", "critic")."""

    def policy_state(self) -> dict[str, Tensor]:
        """Every tensor of the policy, whole, on the CPU, by its transformers module name (experts fused)."""

    def critic_state(self) -> dict[str, Tensor]:
        """The same for the critic: `backbone.<transformers name>` and `head.*`."""

    def save(self, directory: Path) -> None:
        """Write weights, optimiser state and random state as safetensors and JSON into an existing directory."""

    def load(self, directory: Path) -> None:
        """Continue from what `save` wrote; BackendError names the first thing that does not fit."""

    def close(self) -> None:
        """Give back what the constructor took (process groups); nothing may be called after it."""
