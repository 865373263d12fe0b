"""PPO's clip as token weights: the surrogate's own gradient, by differentiation and by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.trainer.core.dis import Verdict
from services.trainer.core.losses import policy_loss_sum
from services.trainer.core.ppo import clipped_weights

LOW, HIGH = 0.2, 0.28
log_ratios = st.floats(-2.0, 2.0).filter(lambda x: min(abs(x - math.log1p(-LOW)), abs(x - math.log1p(HIGH))) > 1e-3)
advantages = st.floats(-3.0, 3.0).filter(lambda x: abs(x) > 1e-3)


def surrogate(logp_T: Tensor, old_T: Tensor, advantages_T: Tensor) -> Tensor:
    """Minus the sum of min(rho A, clip(rho) A), as the paper writes it."""
    ratio_T = torch.exp(logp_T - old_T)
    return -torch.minimum(ratio_T * advantages_T, ratio_T.clamp(1 - LOW, 1 + HIGH) * advantages_T).sum()


def weights(logp_T: Tensor, old_T: Tensor, advantages_T: Tensor, **masks: Tensor) -> tuple[Tensor, Tensor]:
    everywhere_T = torch.ones(len(logp_T), dtype=torch.bool)
    action_T = masks.get("action_T", everywhere_T)
    stale_T = masks.get("stale_T", ~everywhere_T)
    return clipped_weights(logp_T, old_T, advantages_T, action_T, LOW, HIGH, stale_T)


@given(st.lists(st.tuples(log_ratios, advantages), min_size=1, max_size=12))
def test_the_weighted_log_prob_has_the_gradient_of_the_clipped_surrogate(tokens: list[tuple[float, float]]) -> None:
    old_T = torch.linspace(-3.0, -0.5, len(tokens), dtype=torch.float64)
    logp_T = (old_T + torch.tensor([x for x, _ in tokens], dtype=torch.float64)).requires_grad_()
    advantages_T = torch.tensor([a for _, a in tokens], dtype=torch.float64)
    (expected_T,) = torch.autograd.grad(surrogate(logp_T, old_T, advantages_T), logp_T)

    weight_T, _ = weights(logp_T, old_T, advantages_T)
    (found_T,) = torch.autograd.grad(policy_loss_sum(logp_T, weight_T, advantages_T), logp_T)

    torch.testing.assert_close(found_T, expected_T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "verdict"),
    [
        (0.0, 1.0, Verdict.ACCEPTED),
        (0.5, 1.0, Verdict.REJECTED_HIGH),
        (0.5, -1.0, Verdict.ACCEPTED),
        (-0.5, -1.0, Verdict.REJECTED_LOW),
        (-0.5, 1.0, Verdict.ACCEPTED),
        (math.nan, 1.0, Verdict.NON_FINITE),
        (math.inf, 1.0, Verdict.NON_FINITE),
        (-math.inf, -1.0, Verdict.NON_FINITE),
        (1e4, 1.0, Verdict.REJECTED_HIGH),
    ],
)
def test_the_sign_of_the_advantage_decides_which_side_is_clipped(
    log_ratio: float, advantage: float, verdict: Verdict
) -> None:
    weight_T, verdict_T = weights(torch.tensor([log_ratio]), torch.zeros(1), torch.tensor([advantage]))
    assert verdict_T.tolist() == [verdict]
    assert (weight_T.item() != 0) == (verdict is Verdict.ACCEPTED)
    assert bool(torch.isfinite(weight_T).all())


def test_stale_tokens_and_observations_carry_nothing() -> None:
    logp_T = torch.zeros(3)
    action_T, stale_T = torch.tensor([True, True, False]), torch.tensor([False, True, False])
    weight_T, verdict_T = weights(logp_T, logp_T, torch.ones(3), action_T=action_T, stale_T=stale_T)
    assert weight_T.tolist() == [1.0, 0.0, 0.0]
    assert verdict_T[1] == Verdict.STALE
