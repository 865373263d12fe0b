"""Which experts an engine routed each token to: what routing replay carries from the rollout to the trainer.

A record is uint8, [rows, layers, experts per token]; row i is the routing of token i. The last token of a sequence is
never forwarded, so T tokens have T - 1 rows. NO_RECORD in every slot of a layer: no forward of the engine that sampled
the trajectory is on record there, and the trainer's own router chooses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sao.config.errors import ConfigError
from sao.config.schema import RunConfig

NO_RECORD = 255
MOST_EXPERTS = NO_RECORD
"""Ids are bytes, and one of the 256 is taken."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What transformers' configurations call the number of experts of a layer."""


class UnroutableModelError(ValueError):
    """A model whose routing cannot be recorded."""


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """What a model's record looks like."""

    layers: int
    """All of the model's, dense ones too: there the slots mean nothing."""
    experts: int
    """Of each layer; ids are below it."""
    per_token: int
    """Experts that each token is sent to, in each layer."""

    def __post_init__(self) -> None:
        if self.experts > MOST_EXPERTS:
            msg = f"{self.experts} experts, expected at most {MOST_EXPERTS}: the record has one byte for an id"
            raise UnroutableModelError(msg)

    @classmethod
    def of_model(cls, config: Mapping[str, Any]) -> RoutingShape:
        """That of a parsed Hugging Face config.json; UnroutableModelError when the model has no router to replay."""
        config = config.get("text_config") or config
        experts = next((config[name] for name in _EXPERTS if config.get(name)), 0)
        layers, per_token = config.get("num_hidden_layers", 0), config.get("num_experts_per_tok", 0)
        if not (experts and layers and per_token):
            kind = config.get("model_type", "this model")
            found = f"{kind} has {experts} experts, {per_token} for each token, in {layers} layers"
            msg = f"{found}: expected a mixture of experts (a dense model has no router)"
            raise UnroutableModelError(msg)
        return cls(layers=layers, experts=experts, per_token=per_token)

    @property
    def row_bytes(self) -> int:
        """Size of one token's record."""
        return self.layers * self.per_token

    def problem(self, record: bytes, rows: int) -> str:
        """What is wrong with a record of `rows` tokens; nothing when it is whole."""
        expected = rows * self.row_bytes
        if len(record) != expected:
            shape = f"{rows} tokens x {self.layers} layers x {self.per_token} experts"
            return f"{len(record)} bytes, expected {expected}: {shape}"
        strange = record.translate(None, delete=bytes([*range(self.experts), NO_RECORD]))
        if strange:
            return f"holds expert {strange[0]}, expected ids below {self.experts}, or {NO_RECORD} for no record"
        return ""


def replayed_routing(config: RunConfig, model: Path) -> RoutingShape | None:
    """The record of the model in the checkpoint directory `model`; None while routing replay is off.

    ConfigError when it is on and the model has no routing to replay.
    """
    if not config.trainer.routing_replay:
        return None
    return _routing_of(json.loads((model / "config.json").read_bytes()))


def expected_routing(config: RunConfig) -> RoutingShape | None:
    """The same from the run file alone; None also where model.path has no config.json on this machine."""
    if not config.trainer.routing_replay:
        return None
    if config.model.path is not None:
        file = config.model.path.expanduser() / "config.json"
        return _routing_of(json.loads(file.read_bytes())) if file.is_file() else None
    tiny = config.model
    shape = {
        "num_hidden_layers": tiny.layers,
        "num_experts": tiny.experts,
        "num_experts_per_tok": tiny.experts_per_token,
    }
    return _routing_of({"model_type": "the tiny model", **shape})


def _routing_of(model: Mapping[str, Any]) -> RoutingShape:
    try:
        return RoutingShape.of_model(model)
    except UnroutableModelError as error:
        raise ConfigError(key="trainer.routing_replay", message=str(error)) from error
