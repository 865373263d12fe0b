"""The shape of a record, from a checkpoint's own words, and what does not have that shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sao.config import ConfigError, load_run_config
from sao.routing import NO_RECORD, RoutingShape, UnroutableModelError, replayed_routing

SIZES = {"num_hidden_layers": 3, "num_experts_per_tok": 2}
SHAPE = RoutingShape(layers=3, experts=5, per_token=2)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_every_name_for_the_number_of_experts_is_known(name: str) -> None:
    assert RoutingShape.of_model({**SIZES, name: 5}) == SHAPE
    assert RoutingShape.of_model({"model_type": "pictures-too", "text_config": {**SIZES, name: 5}}) == SHAPE


@pytest.mark.parametrize("missing", ["num_experts", "num_hidden_layers", "num_experts_per_tok"])
def test_a_model_that_does_not_say_is_refused(missing: str) -> None:
    config = {**SIZES, "num_experts": 5, "model_type": "some", missing: 0}
    with pytest.raises(UnroutableModelError, match=r"some has .* expected a mixture of experts"):
        RoutingShape.of_model(config)


def test_one_id_is_kept_for_no_record() -> None:
    assert RoutingShape(layers=1, experts=255, per_token=1).problem(bytes([254, NO_RECORD]), 2) == ""
    with pytest.raises(UnroutableModelError, match="256 experts, expected at most 255"):
        RoutingShape(layers=1, experts=256, per_token=1)


def test_a_record_has_a_byte_for_each_decision() -> None:
    assert SHAPE.problem(bytes(4 * 6), 4) == ""
    assert SHAPE.problem(b"", 0) == ""
    assert SHAPE.problem(bytes(23), 4) == "23 bytes, expected 24: 4 tokens x 3 layers x 2 experts"
    assert SHAPE.problem(bytes(23) + b"\5", 4) == "holds expert 5, expected ids below 5, or 255 for no record"


def test_a_run_has_a_record_only_while_routes_are_replayed(tmp_path: Path) -> None:
    on = load_run_config(None, ["trainer.routing_replay=true"], env={})
    off = load_run_config(None, [], env={})
    assert replayed_routing(off, tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "num_experts": 5}))
    assert replayed_routing(on, tmp_path) == SHAPE
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dense"}))
    with pytest.raises(ConfigError, match=r"^trainer\.routing_replay: dense has 0 experts"):
        replayed_routing(on, tmp_path)
