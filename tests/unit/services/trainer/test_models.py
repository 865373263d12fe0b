"""Chunks change neither log-probs nor gradients, and the critic reads the state before each token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.trainer.models import CriticModule, PolicyModule
from tests.support.zero_updates import save_small_checkpoint

TOKENS_T = torch.arange(3, 20)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_checkpoint(tmp_path_factory.mktemp("small"))


def _gradients(checkpoint: Path, chunk: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    policy = PolicyModule.load(checkpoint, torch.float32, chunk)
    logp_T, entropy_T, _ = policy(TOKENS_T)
    torch.autograd.backward((logp_T * torch.arange(len(logp_T))).sum() + entropy_T.square().sum())
    return logp_T, entropy_T, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk", [1, 5, 16, 17])
def test_chunks_change_nothing(checkpoint: Path, chunk: int) -> None:
    logp_T, entropy_T, gradients = _gradients(checkpoint, chunk)
    whole_logp_T, whole_entropy_T, whole_gradients = _gradients(checkpoint, 1000)
    torch.testing.assert_close(logp_T, whole_logp_T)
    torch.testing.assert_close(entropy_T, whole_entropy_T)
    assert gradients.keys() == whole_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, whole_gradients[name], rtol=1e-4, atol=1e-5)


def test_no_logits_of_the_whole_sequence_are_made(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = PolicyModule.load(checkpoint, torch.float32, 4)
    widths: list[int] = []
    real = torch.log_softmax

    def noted(x: Tensor, dim: int) -> Tensor:
        widths.append(x.shape[0])
        return real(x, dim=dim)

    monkeypatch.setattr(torch, "log_softmax", noted)
    torch.autograd.backward(policy(TOKENS_T)[0].sum())
    assert max(widths) == 4
    assert sum(widths) == 2 * 16, "forward once, and once more in backward"


def test_a_value_is_of_the_state_before_its_token(checkpoint: Path) -> None:
    critic = CriticModule.load(checkpoint, torch.float32, ["self_attn"])
    torch.nn.init.normal_(critic.head.weight)
    values_T = critic(TOKENS_T)
    changed_T = TOKENS_T.clone()
    changed_T[9] += 1
    moved_T = critic(changed_T) != values_T
    assert not moved_T[:10].any(), "the value of a state saw the token chosen in it"
    assert moved_T[10]


def test_bfloat16_networks_answer_in_float32(checkpoint: Path) -> None:
    logp_T, entropy_T, _ = PolicyModule.load(checkpoint, torch.bfloat16, 8)(TOKENS_T)
    values_T = CriticModule.load(checkpoint, torch.bfloat16, [])(TOKENS_T)
    assert {logp_T.dtype, entropy_T.dtype, values_T.dtype} == {torch.float32}


def test_freezing_everything_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="leave something to train"):
        CriticModule.load(checkpoint, torch.float32, ["."])


def test_a_model_that_transforms_its_logits_is_refused(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        PolicyModule(model, 8)


def test_what_is_frozen_in_the_policy_does_not_train(checkpoint: Path) -> None:
    policy = PolicyModule.load(checkpoint, torch.float32, 4, frozen=[r"\.mlp\.gate\."])
    frozen = {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}
    assert frozen
    assert all(".mlp.gate." in name for name in frozen)
