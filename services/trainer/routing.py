"""Routing replay: a forward in which every token goes to the experts that the engine sent it to.

The router picks other experts in the engine than in the trainer wherever two scores are close, so that the two compute
log-probs of different functions. Replayed, only the choice is the engine's: the weights of the chosen experts are the
trainer's own scores of them, so gradients reach the router as usual.

    own:       indices = top-k of the router's scores;    weights = scores[indices], renormalised where the model does
    replayed:  indices = the record;                      weights by the same rule

Letters: T tokens that are forwarded, L layers, K experts per token, E experts of a layer.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sao.routing import NO_RECORD, RoutingShape

Rule = Callable[[Tensor, Tensor], Tensor]
"""Logits [T, E] and indices [T, K] to the weights [T, K] of the chosen experts, in at least float32."""

_PROBE_TOKENS = 8


class UnsupportedRouterError(ValueError):
    """A model whose routers replay does not understand; names the class."""


@dataclass
class Replayed:
    """One forward's routes, and how often each router would have chosen otherwise."""

    routes_TLK: Tensor
    missed_T: dict[int, Tensor] = field(default_factory=dict)
    """Share of a layer's recorded experts that are not among its router's own, by layer; NaN without a record."""

    def disagreement(self) -> Tensor:
        """[T] mean over the layers that are on record; NaN where none is."""
        return torch.stack(list(self.missed_T.values())).nanmean(0)


class RoutingReplay:
    """Hooks on every router of a mixture-of-experts model; idle outside of `of`.

    UnsupportedRouterError when a layer with experts has no router whose weights are its scores of the chosen experts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._shape = RoutingShape.of_model(model.config.to_dict())
        self._replayed: Replayed | None = None
        for layer, router in _routers(model).items():
            rule = _rule_of(router)
            router.register_forward_hook(partial(self._reroute, layer, rule))

    @contextmanager
    def of(self, routes_TLK: Tensor, tokens: int) -> Iterator[Replayed]:
        """Replay these routes in the one forward, over `tokens` tokens, made inside; ValueError for another shape."""
        expected = (tokens, self._shape.layers, self._shape.per_token)
        if tuple(routes_TLK.shape) != expected:
            msg = f"routes of shape {tuple(routes_TLK.shape)}: expected {expected} (tokens, layers, experts per token)"
            raise ValueError(msg)
        self._replayed = Replayed(routes_TLK)
        try:
            yield self._replayed
        finally:
            self._replayed = None

    def _reroute(
        self, layer: int, rule: Rule, _router: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        replayed = self._replayed
        if replayed is None:
            return None
        logits_TE, weights_TK, own_TK = output
        recorded_TK = replayed.routes_TLK[:, layer].long()
        known_T = (recorded_TK != NO_RECORD).all(-1)
        chosen_TK = torch.where(known_T[:, None], recorded_TK, own_TK)
        missed_TK = (chosen_TK[:, :, None] != own_TK[:, None, :]).all(-1)
        replayed.missed_T[layer] = torch.where(known_T, missed_TK.float().mean(-1), math.nan)
        return logits_TE, rule(logits_TE, chosen_TK).to(weights_TK.dtype), chosen_TK


def _routers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The router of each mixture-of-experts layer of the backbone, by the layer's number."""
    found: dict[int, nn.Module] = {}
    for name, block in model.base_model.named_modules():
        if not hasattr(block, "experts"):
            continue
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", f"{name}.")
        routers = [child for child in block.children() if "router" in type(child).__name__.lower()]
        if layer is None or len(routers) != 1:
            msg = f"{name} ({type(block).__name__}): expected experts with one router beside them, in a numbered layer"
            raise UnsupportedRouterError(msg)
        found[int(layer[1])] = routers[0]
    if not found:
        msg = f"{type(model).__name__} has no layer with experts: there is no routing to replay"
        raise UnsupportedRouterError(msg)
    return found


@torch.no_grad()
def _rule_of(router: nn.Module) -> Rule:
    """The rule by which this router weights the experts it chooses, found by what it does with a few inputs."""
    kind = type(router).__name__
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        msg = f"{kind} has no weight [experts, hidden]: its routing cannot be replayed"
        raise UnsupportedRouterError(msg)
    inputs_TD = torch.linspace(-1, 1, _PROBE_TOKENS * weight.shape[1], device=weight.device).reshape(_PROBE_TOKENS, -1)
    try:
        logits_TE, weights_TK, indices_TK = copy.deepcopy(router).float()(inputs_TD)
    except (TypeError, ValueError) as error:
        msg = f"{kind} does not give (logits, weights, indices) of hidden states alone: its routing cannot be replayed"
        raise UnsupportedRouterError(msg) from error
    scale = float(getattr(router, "routed_scaling_factor", 1.0))
    for activation, renormalised in product((_softmax, _sigmoid), (True, False)):
        rule = partial(_weights, activation, renormalised, scale)
        if weights_TK.shape == indices_TK.shape and torch.allclose(rule(logits_TE, indices_TK), weights_TK, rtol=1e-5):
            return rule
    msg = f"{kind} does not weight experts by softmax or sigmoid of its logits: its routing cannot be replayed"
    raise UnsupportedRouterError(msg)


def _softmax(logits_TE: Tensor) -> Tensor:
    return logits_TE.softmax(-1)


def _sigmoid(logits_TE: Tensor) -> Tensor:
    return logits_TE.sigmoid()


def _weights(
    activation: Callable[[Tensor], Tensor], renormalised: bool, scale: float, logits_TE: Tensor, indices_TK: Tensor
) -> Tensor:
    scores_TE = activation(logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32)))
    weights_TK = scores_TE.gather(-1, indices_TK)
    if renormalised:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK * scale
