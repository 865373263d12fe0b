"""Replaying changes the choice of experts and nothing else: not their weights, not the gradient, not the other rows."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from sao.routing import NO_RECORD, UnroutableModelError
from services.trainer.backends.torch_reference import TorchReferenceBackend
from services.trainer.core.update import TrajectoryTensors, Update, UpdateSettings
from services.trainer.models import PolicyModule
from services.trainer.routing import RoutingReplay, UnsupportedRouterError
from tests.support.zero_updates import random_routes, zero_config

TOKENS_T = torch.arange(3, 20)
ROWS = len(TOKENS_T) - 1

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 4, "norm_topk_prob": True},
    "Qwen2Moe": {"num_experts": 4, "norm_topk_prob": False, "shared_expert_intermediate_size": 16},
    "Olmoe": {"num_experts": 4},
    "Mixtral": {"num_local_experts": 4},
    "Glm4Moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}


@pytest.fixture
def checkpoint(tiny_checkpoints: tuple[Path, Path]) -> Path:
    """Two layers, two of four experts for a token; its weights are large enough for routes to matter."""
    return tiny_checkpoints[0]


def family(name: str, **settings: object) -> PreTrainedModel:
    """A random model of this family."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SMALL | FAMILIES.get(name, {}) | settings))
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.eval()


def routers_of(model: nn.Module) -> dict[int, nn.Module]:
    """By the number of their layer."""
    named = {name: m for name, m in model.named_modules() if type(m).__name__.lower().endswith("topkrouter")}
    return {int(name.split("layers.")[1].split(".")[0]): router for name, router in named.items()}


@torch.no_grad()
def own_routes(policy: PolicyModule, *, layers: int = 2, per_token: int = 2) -> Tensor:
    """What the model's routers choose by themselves; zeros, as an engine reports them, in a dense layer."""
    routes_TLK = torch.zeros((ROWS, layers, per_token), dtype=torch.uint8)
    hooks = []
    for layer, router in routers_of(policy.model).items():

        def note(_module: nn.Module, _inputs: object, output: tuple[Tensor, ...], layer: int = layer) -> None:
            routes_TLK[:, layer] = output[2].to(torch.uint8)

        hooks.append(router.register_forward_hook(note))
    policy(TOKENS_T)
    for hook in hooks:
        hook.remove()
    return routes_TLK


def full_routes(seed: int) -> Tensor:
    """Random, and every row on record."""
    routes_TLK = random_routes(torch.Generator().manual_seed(seed), ROWS)
    return torch.where(routes_TLK == NO_RECORD, torch.tensor([3, 1], dtype=torch.uint8), routes_TLK)


def others(routes_TLK: Tensor) -> Tensor:
    """The two experts of four that were not chosen."""
    chosen_TLE = nn.functional.one_hot(routes_TLK.long(), 4).sum(-2)
    return chosen_TLE.argsort(-1)[..., :2].to(torch.uint8)


def loaded(checkpoint: Path, dtype: torch.dtype = torch.float32) -> PolicyModule:
    return PolicyModule.load(checkpoint, dtype, 8, replay=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replaying_the_own_routes_changes_no_bit(checkpoint: Path, dtype: torch.dtype) -> None:
    policy = loaded(checkpoint, dtype)
    logp_T, entropy_T, nothing = policy(TOKENS_T)
    replayed_T, its_entropy_T, disagreement_T = policy(TOKENS_T, own_routes(policy))
    assert nothing is None
    assert torch.equal(replayed_T, logp_T)
    assert torch.equal(its_entropy_T, entropy_T)
    assert math.isnan(disagreement_T[0])
    assert disagreement_T[1:].tolist() == [0.0] * ROWS


@pytest.mark.parametrize("name", FAMILIES)
def test_the_rule_of_every_family_is_found(name: str) -> None:
    policy = PolicyModule(family(name), 64, replay=True)
    routes_TLK = own_routes(policy)
    logp_T, _, _ = policy(TOKENS_T)
    replayed_T, _, disagreement_T = policy(TOKENS_T, routes_TLK)
    torch.testing.assert_close(replayed_T, logp_T, rtol=0, atol=1e-6)
    assert disagreement_T[1:].tolist() == [0.0] * ROWS
    other_T, _, disagreement_T = policy(TOKENS_T, others(routes_TLK))
    assert not torch.allclose(other_T, logp_T, atol=1e-4)
    assert 0.5 < disagreement_T[1:].mean() <= 1.0


@contextmanager
def by_hand(model: PreTrainedModel, routes_TLK: Tensor) -> Iterator[None]:
    """Every mixture layer of a Qwen3-MoE computed token by token, expert by expert, on these routes."""

    def forward(block: Any, hidden_BTD: Tensor, layer: int) -> Tensor:
        hidden_TD = hidden_BTD[0]
        mixed = []
        for hidden_D, chosen_K in zip(hidden_TD, routes_TLK[:, layer].tolist(), strict=True):
            scores_E = torch.softmax(block.gate.weight @ hidden_D, -1)
            total = sum(scores_E[expert] for expert in chosen_K)
            out_D = torch.zeros_like(hidden_D)
            for expert in chosen_K:
                gate, up = (block.experts.gate_up_proj[expert] @ hidden_D).chunk(2)
                out_D = out_D + scores_E[expert] / total * (
                    block.experts.down_proj[expert] @ (nn.functional.silu(gate) * up)
                )
            mixed.append(out_D)
        return torch.stack(mixed)[None]

    blocks = [layer.mlp for layer in model.base_model.layers]
    for number, block in enumerate(blocks):
        block.forward = types.MethodType(lambda self, x, number=number: forward(self, x, number), block)
    yield
    for block in blocks:
        del block.forward


def test_other_routes_give_what_a_forward_by_hand_gives(checkpoint: Path) -> None:
    policy = loaded(checkpoint)
    routes_TLK = full_routes(1)
    own_T, _, _ = policy(TOKENS_T)
    found_T, _, _ = policy(TOKENS_T, routes_TLK)
    with by_hand(policy.model, routes_TLK):
        expected_T, _, _ = policy(TOKENS_T)
    torch.testing.assert_close(found_T, expected_T, rtol=1e-5, atol=1e-5)
    assert (found_T - own_T).abs().max() > 0.1


def exact_norms(model: PreTrainedModel) -> None:
    """RMSNorm in the dtype of its input: the model's own rounds to float32, which finite differences would show."""

    def forward(norm: Any, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return cast("Tensor", norm.weight * x * scale)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(forward, module)


def test_the_gradient_is_that_of_finite_differences(checkpoint: Path) -> None:
    policy = loaded(checkpoint, torch.float64)
    policy.model.set_experts_implementation("eager")  # the grouped product has no float64 form
    exact_norms(policy.model)
    draw, routes_TLK = torch.Generator().manual_seed(2), full_routes(2)
    weight_T = torch.randn(len(TOKENS_T), generator=draw, dtype=torch.float64)

    def loss() -> Tensor:
        logp_T: Tensor = policy(TOKENS_T, routes_TLK)[0]
        return (logp_T * weight_T).sum()

    torch.autograd.backward(loss())
    step = 1e-5
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        direction = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        slopes = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.add_(direction, alpha=sign * step)
                slopes.append(float(loss()))
                parameter.sub_(direction, alpha=sign * step)
        expected = (slopes[0] - slopes[1]) / (2 * step)
        assert float((parameter.grad * direction).sum()) == pytest.approx(expected, rel=1e-4), name
    assert all(router.weight.grad.abs().max() > 1e-3 for router in routers_of(policy.model).values())  # type: ignore[operator, union-attr]


def test_rows_without_a_record_are_routed_by_the_own_router(checkpoint: Path) -> None:
    policy = loaded(checkpoint)
    own_T, _, _ = policy(TOKENS_T)
    nothing_TLK = torch.full((ROWS, 2, 2), NO_RECORD, dtype=torch.uint8)
    found_T, _, disagreement_T = policy(TOKENS_T, nothing_TLK)
    assert torch.equal(found_T, own_T)
    assert disagreement_T.isnan().all()

    partly_TLK = nothing_TLK.clone()
    partly_TLK[6] = others(own_routes(policy))[6]
    found_T, _, disagreement_T = policy(TOKENS_T, partly_TLK)
    assert torch.equal(found_T[:7], own_T[:7]), "row 6 speaks about token 7"
    assert (found_T[7:] != own_T[7:]).all()
    assert disagreement_T.isnan().tolist() == [place != 7 for place in range(len(TOKENS_T))]


def test_the_disagreement_counts_decisions_on_record(checkpoint: Path) -> None:
    policy = loaded(checkpoint)
    routes_TLK = own_routes(policy)
    other = next(expert for expert in range(4) if expert not in routes_TLK[4, 1].tolist())
    routes_TLK[4, 1, 0] = other  # one of the four decisions of a row, in the last layer, where nothing follows from it
    routes_TLK[5, 0] = NO_RECORD  # two of four are on record
    routes_TLK[6] = routes_TLK[6].flip(-1)  # the order of the slots means nothing
    _, _, disagreement_T = policy(TOKENS_T, routes_TLK)
    expected = [0.0] * ROWS
    expected[4] = 0.25
    assert disagreement_T[1:].tolist() == expected


def test_an_update_reports_the_disagreement_of_its_action_tokens(checkpoint: Path) -> None:
    config = zero_config(0)
    backend = TorchReferenceBackend(config, checkpoint)
    update = Update(backend, UpdateSettings.of(config))
    policy = loaded(checkpoint)
    mask_T = torch.zeros(len(TOKENS_T), dtype=torch.bool)
    mask_T[[5, 9, 10, 11]] = True
    routes_TLK = own_routes(policy)
    wrong_TLK = others(routes_TLK)
    routes_TLK[9, 1] = wrong_TLK[9, 1]  # behind token 10
    routes_TLK[12] = wrong_TLK[12]  # behind no action token
    routes_TLK[10] = NO_RECORD  # behind token 11

    logp_T = torch.where(mask_T, -3.0, 0.0)
    zeros_T = torch.zeros_like(TOKENS_T)
    trajectory = TrajectoryTensors(TOKENS_T, mask_T, logp_T, zeros_T, 1.0, routes_TLK=routes_TLK)
    update.begin()
    update.accumulate(trajectory)
    assert update.finish().metrics["routing_disagreement"] == pytest.approx(0.5 / 3)
    update.begin()
    update.accumulate(TrajectoryTensors(TOKENS_T, mask_T, logp_T, zeros_T, 1.0))
    assert "routing_disagreement" not in update.finish().metrics


def test_routes_are_gone_after_their_forward_and_after_one_that_fails(checkpoint: Path) -> None:
    policy = loaded(checkpoint)
    own_T, _, _ = policy(TOKENS_T)
    policy(TOKENS_T, others(own_routes(policy)))
    assert torch.equal(policy(TOKENS_T)[0], own_T)
    with pytest.raises(IndexError):
        policy(TOKENS_T + 100, own_routes(policy))
    assert torch.equal(policy(TOKENS_T)[0], own_T)


@pytest.mark.parametrize("shape", [(ROWS - 1, 2, 2), (ROWS, 3, 2), (ROWS, 2, 1)])
def test_routes_of_another_shape_are_refused(checkpoint: Path, shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=rf"expected \({ROWS}, 2, 2\)"):
        loaded(checkpoint)(TOKENS_T, torch.zeros(shape, dtype=torch.uint8))


def test_a_policy_that_was_not_loaded_for_replay_refuses_routes(checkpoint: Path) -> None:
    policy = PolicyModule.load(checkpoint, torch.float32, 8)
    with pytest.raises(ValueError, match=r"trainer\.routing_replay"):
        policy(TOKENS_T, own_routes(policy))


def test_a_dense_model_has_nothing_to_replay() -> None:
    dense = family("Qwen3")
    with pytest.raises(UnroutableModelError, match=r"qwen3 has 0 experts.*dense model has no router"):
        RoutingReplay(dense)
    mixed = family("Qwen3Moe", mlp_only_layers=[0, 1])
    with pytest.raises(UnsupportedRouterError, match="Qwen3MoeForCausalLM has no layer with experts"):
        RoutingReplay(mixed)


def test_a_router_that_is_not_understood_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedRouterError, match="MiniMaxM2TopKRouter"):
        RoutingReplay(family("MiniMaxM2", num_local_experts=4))
    model = family("Qwen3Moe")
    router = routers_of(model)[1]
    forward = router.forward

    def doubled(hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE, weights_TK, indices_TK = forward(hidden_TD)
        return logits_TE, 2 * weights_TK, indices_TK

    router.forward = doubled
    with pytest.raises(UnsupportedRouterError, match="Qwen3MoeTopKRouter does not weight experts by"):
        RoutingReplay(model)


def test_more_experts_than_a_byte_can_name_are_refused() -> None:
    with pytest.raises(UnroutableModelError, match="256 experts, expected at most 255"):
        RoutingReplay(family("Qwen3Moe", num_experts=256))


def test_what_is_loaded_for_replay_is_still_the_checkpoint(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    names = {f"model.{name}" for name, _ in model.named_parameters()}
    assert {name for name, _ in loaded(checkpoint).named_parameters()} == names | {
        name for name, _ in PolicyModule.load(checkpoint, torch.float32, 8).named_parameters()
    }
