"""Which versions wait: what was something and is nothing now, and what talks like another model."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from sao.weights.manifest import CanarySequence, FileEntry, Manifest, TensorEntry
from services.weights.guards import Doubt, doubt, drift, newly_zero

HEAD, BIAS = "lm_head.weight", "model.layers.0.mlp.gate.bias"


def version(name: str, shas: dict[str, str], logprobs: list[float], *, dtype: str = "float32") -> Manifest:
    return Manifest(
        run="test",
        version=name,
        update=0,
        parent=None,
        trainer_epoch=1,
        created_s=0.0,
        dtype=dtype,
        tensors=[TensorEntry(name=one, shape=[2], dtype=dtype, sha256=sha * 64) for one, sha in shas.items()],
        files=[FileEntry(name="model.safetensors", size=1, sha256="0" * 64)],
        canary=[CanarySequence(token_ids=list(range(len(logprobs) + 1)), logprobs=logprobs)],
    )


BEFORE = version("v00000001", {HEAD: "a", BIAS: "0"}, [-1.0, -2.0])


def test_a_tensor_that_became_zero_holds_the_version_by_name() -> None:
    after = version("v00000002", {HEAD: "0", BIAS: "0"}, [-1.0, -2.0])
    found = doubt(after, BEFORE, zeros=[HEAD, BIAS], drift_max=None)
    assert found == Doubt("zero_tensor", f"{HEAD} holds nothing but zeros, and did not in v00000001")


def test_a_tensor_that_was_zero_before_is_no_accident() -> None:
    after = version("v00000002", {HEAD: "b", BIAS: "0"}, [-1.0, -2.0])
    assert newly_zero(after, BEFORE, [BIAS]) == []


def test_zeros_of_another_dtype_or_a_new_name_are_not_compared() -> None:
    assert newly_zero(version("v00000002", {BIAS: "1"}, [-1.0], dtype="bfloat16"), BEFORE, [BIAS]) == []
    assert newly_zero(version("v00000002", {"new": "1"}, [-1.0]), BEFORE, ["new"]) == []


@pytest.mark.parametrize(("bound", "held"), [(0.75, False), (0.74, True), (None, False)])
def test_drift_is_the_mean_over_the_canary_and_the_bound_itself_is_allowed(bound: float | None, held: bool) -> None:
    after = version("v00000002", {HEAD: "b", BIAS: "0"}, [-1.5, -1.0])
    assert drift(after, BEFORE) == 0.75
    found = doubt(after, BEFORE, zeros=[], drift_max=bound)
    assert REGISTRY.get_sample_value("sao_weights_canary_drift_nats") == 0.75
    assert (found is not None) == held
    if found is not None:
        assert found.guard == "canary_drift"
        assert "0.75 nats from those of v00000001 on average, allowed 0.74" in found.detail


def test_other_canary_tokens_are_not_compared() -> None:
    after = version("v00000002", {HEAD: "b"}, [-9.0, -9.0, -9.0])
    assert drift(after, BEFORE) is None
    assert doubt(after, BEFORE, zeros=[], drift_max=0.1) is None


def test_the_first_version_is_compared_with_nothing() -> None:
    assert doubt(BEFORE, None, zeros=[HEAD, BIAS], drift_max=0.1) is None
