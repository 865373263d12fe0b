"""The two networks as the trainer differentiates them: token log-probs of the policy, state values of the critic.

Full-vocabulary logits exist for `chunk` positions at a time; their float32 form for a whole trajectory is what runs
long-context trainers out of memory. The backward pass computes each chunk again.
Letters: T tokens of one trajectory, C positions of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from services.trainer.routing import RoutingReplay

_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class ScoringHead(nn.Module):
    """Log-probs and entropies from hidden states, by the model's own output weights (shared, not copied).

    One module call whatever the number of chunks: under ZeRO-3 each call of a module is a collective, and ranks
    whose trajectories differ in length must still make the same ones.
    """

    def __init__(self, output: nn.Module, chunk: int) -> None:
        super().__init__()
        if not isinstance(output, nn.Linear):
            msg = f"the language-model head is {type(output).__name__}, expected a Linear"
            raise TypeError(msg)
        self.weight = output.weight
        self.bias = output.bias
        self._chunk = chunk

    def forward(self, hidden_TD: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        """[T] log-prob of each target and [T] entropy, in at least float32."""
        if len(targets_T) <= self._chunk:
            return self._score(hidden_TD, targets_T)
        chunks = zip(torch.split(hidden_TD, self._chunk), torch.split(targets_T, self._chunk), strict=True)
        scored = [checkpoint(self._score, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat([logp_C for logp_C, _ in scored]), torch.cat([entropy_C for _, entropy_C in scored])

    def _score(self, hidden_CD: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = nn.functional.linear(hidden_CD, self.weight, self.bias)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        logp_CV = torch.log_softmax(logits_CV, dim=-1)
        logp_C = logp_CV.gather(-1, targets_C[:, None]).squeeze(-1)
        return logp_C, -(logp_CV.exp() * logp_CV).sum(-1)


class PolicyModule(nn.Module):
    """A causal language model; parameters are named `model.<transformers name>`. `replay`: it takes recorded routes."""

    def __init__(self, model: PreTrainedModel, chunk: int, *, replay: bool = False) -> None:
        super().__init__()
        config = model.config
        for name in _LOGIT_TRANSFORMS:
            if getattr(config, name, None) not in (None, 1.0):
                msg = f"{type(model).__name__} has {name}: only logits that are the head's plain output are supported"
                raise ValueError(msg)
        self.model = model
        self.head = ScoringHead(model.get_output_embeddings(), chunk)
        self._replay = RoutingReplay(model) if replay else None

    @classmethod
    def load(
        cls, directory: Path, dtype: torch.dtype, chunk: int, *, replay: bool = False, frozen: Sequence[str] = ()
    ) -> PolicyModule:
        """From a Hugging Face checkpoint directory, in evaluation mode (no dropout: ratios compare two forwards).

        Parameters whose name any `frozen` pattern finds don't train.
        """
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
        policy = cls(model, chunk, replay=replay).eval()
        freeze(policy, frozen)
        return policy

    def forward(self, tokens_T: Tensor, routes_TLK: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """[T] log-prob of each token given those before it, and [T] entropy; both 0 at position 0, >= float32.

        With routes ([T-1] rows, sao.routing) also [T] the share of the routing decisions behind each token's log-prob,
        those of the token before it, in which the recorded expert is not among the own router's; NaN without a record.
        """
        if routes_TLK is None:
            logp_T, entropy_T = self._score(tokens_T)
            return logp_T, entropy_T, None
        if self._replay is None:
            msg = "routes for a policy that was loaded without replay: set trainer.routing_replay"
            raise ValueError(msg)
        with self._replay.of(routes_TLK, len(tokens_T) - 1) as replayed:
            logp_T, entropy_T = self._score(tokens_T)
        disagreement_T = replayed.disagreement()
        return logp_T, entropy_T, torch.cat([disagreement_T.new_full((1,), math.nan), disagreement_T])

    def _score(self, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        backbone = self.model.base_model
        hidden_TD = backbone(input_ids=tokens_T[None, :-1], use_cache=False).last_hidden_state[0]
        logp_T, entropy_T = self.head(hidden_TD, tokens_T[1:])
        zero = logp_T.new_zeros(1)
        return torch.cat([zero, logp_T]), torch.cat([zero, entropy_T])


class ValueHead(nn.Linear):
    """One number per hidden state, zero at first, computed in at least float32."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        return nn.functional.linear(hidden_TD.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).squeeze(-1)


class CriticModule(nn.Module):
    """The policy's backbone with a scalar head; parameters are named `backbone.<transformers name>` and `head.*`."""

    def __init__(self, backbone: PreTrainedModel, frozen: Sequence[str]) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = ValueHead(backbone.config.hidden_size, next(backbone.parameters()).dtype)
        freeze(self, frozen)

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype, frozen: Sequence[str]) -> CriticModule:
        """From the policy's checkpoint directory; parameters whose name any `frozen` pattern finds don't train."""
        with _quiet():
            backbone = AutoModel.from_pretrained(directory, dtype=dtype, local_files_only=True)
        return cls(backbone, frozen).eval()

    def forward(self, tokens_T: Tensor) -> Tensor:
        """[T] value of the state before each token (read at the token before it), 0 at position 0, >= float32."""
        hidden_TD = self.backbone(input_ids=tokens_T[None, :-1], use_cache=False).last_hidden_state[0]
        values_T: Tensor = self.head(hidden_TD)
        return torch.cat([values_T.new_zeros(1), values_T])


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Turn gradients off for every parameter whose name a pattern finds; ValueError when nothing would train."""
    for name, parameter in module.named_parameters():
        if any(re.search(pattern, name) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        msg = f"the patterns {list(patterns)} freeze all of {type(module).__name__}: leave something to train"
        raise ValueError(msg)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no report that the critic leaves the language-model head unused."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
