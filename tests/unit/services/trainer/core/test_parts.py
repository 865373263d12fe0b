"""Laws of the small parts that the acceptance list does not name."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.core.critic import ValueWindow, explained_variance
from services.trainer.core.dis import DisStats, Verdict, importance_weights
from services.trainer.core.gae import length_adaptive_lambda, skip_observation_gae
from services.trainer.core.losses import critic_loss_sum, entropy_sum, k3_estimate, policy_loss_sum, reference_kl_sum
from services.trainer.core.metrics import TokenRecord, token_metrics
from services.trainer.core.staleness import judge_staleness

any_float = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(st.tuples(any_float, any_float, st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_weights_are_never_nan_and_agree_with_their_verdicts(rows: list[tuple[float, float, bool, bool]]) -> None:
    logp, rollout, mask, stale = (list(column) for column in zip(*rows, strict=True))
    mask_T = torch.tensor(mask)
    weight_T, stats = importance_weights(
        torch.tensor(logp), torch.tensor(rollout), mask_T, 0.3, 5.0, torch.tensor(stale)
    )
    assert torch.isfinite(weight_T).all()
    assert (weight_T[~mask_T] == 0).all()
    assert torch.equal(weight_T[mask_T] != 0, stats.verdict_A == Verdict.ACCEPTED)
    accepted = weight_T[weight_T != 0]
    assert ((accepted > 0.7) & (accepted < 6.0)).all()
    assert sum(stats.count(verdict) for verdict in Verdict) == int(mask_T.sum())


def test_verdicts_are_told_apart() -> None:
    log_ratio_T = torch.tensor([0.0, -5.0, 5.0, 0.0, math.nan])
    stale_T = torch.tensor([False, False, False, True, True])
    _, stats = importance_weights(log_ratio_T, torch.zeros(5), torch.ones(5).bool(), 0.3, 5.0, stale_T)
    assert [Verdict(int(v)) for v in stats.verdict_A] == [
        Verdict.ACCEPTED,
        Verdict.REJECTED_LOW,
        Verdict.REJECTED_HIGH,
        Verdict.STALE,
        Verdict.NON_FINITE,
    ]


def test_bfloat16_log_probs_are_compared_in_float32() -> None:
    logp_T = torch.tensor([-1.0, -1.0], dtype=torch.bfloat16)
    weight_T, _ = importance_weights(logp_T, torch.tensor([-1.001, -1.0]), torch.ones(2).bool(), 0.3, 5.0)
    assert weight_T.dtype == torch.float32
    assert weight_T[0] == pytest.approx(math.exp(0.001), rel=1e-4)


@given(actions=st.integers(1, 10**6), alpha=st.floats(0.01, 10.0))
def test_lambda_stays_in_the_unit_interval_and_grows_with_length(actions: int, alpha: float) -> None:
    lam = length_adaptive_lambda(actions, alpha)
    assert 0.0 <= lam <= length_adaptive_lambda(actions + 1, alpha) <= 1.0


def test_lambda_of_the_paper_and_of_nothing() -> None:
    assert length_adaptive_lambda(100, 1.5) == pytest.approx(1 - 1 / 150)
    assert length_adaptive_lambda(1, 0.05) == 0.0
    with pytest.raises(ValueError, match="at least one action token, found 0"):
        length_adaptive_lambda(0, 1.5)


def test_advantages_and_returns_are_zero_off_the_mask_and_no_graph_is_kept() -> None:
    values_T = torch.randn(6, requires_grad=True)
    mask_T = torch.tensor([False, True, False, True, False, False])
    for x_T in skip_observation_gae(values_T, mask_T, 1.0, 0.9, 0.8):
        assert not x_T.requires_grad
        assert (x_T[~mask_T] == 0).all()
    nothing_T, _ = skip_observation_gae(values_T, torch.zeros(6).bool(), 1.0, 1.0, 1.0)
    assert (nothing_T == 0).all()


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=50))
def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one(
    rows: list[tuple[float, float]],
) -> None:
    returns_N = torch.tensor([row[1] for row in rows], dtype=torch.float64)
    if float(returns_N.var(correction=0)) < 1e-6:
        return
    assert explained_variance(returns_N + 3.0, returns_N) == pytest.approx(1.0)
    assert explained_variance(torch.full_like(returns_N, 2.0), returns_N) == pytest.approx(0.0, abs=1e-6)


def test_explained_variance_is_undefined_without_variance() -> None:
    assert math.isnan(explained_variance(torch.tensor([1.0, 2.0]), torch.ones(2)))
    assert math.isnan(ValueWindow(3).explained_variance())


def test_the_window_forgets_its_oldest_trajectory() -> None:
    window = ValueWindow(2)
    window.append(torch.tensor([-50.0]), torch.tensor([50.0]))
    window.append(torch.tensor([1.0]), torch.tensor([1.0]))
    window.append(torch.tensor([0.0]), torch.tensor([0.0]))
    assert window.explained_variance() == pytest.approx(1.0)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_one_broken_trajectory_does_not_blind_the_window(broken: float) -> None:
    window = ValueWindow(4)
    window.append(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    window.append(torch.tensor([broken]), torch.tensor([1.0]))
    window.append(torch.tensor([0.5]), torch.tensor([broken]))
    assert window.explained_variance() == 1.0


def test_losses_are_sums_over_the_mask_and_deaf_to_the_rest() -> None:
    mask_T = torch.tensor([True, False, True])
    nan = math.nan
    values_T = torch.tensor([1.0, nan, 3.0], requires_grad=True)
    loss = critic_loss_sum(values_T, torch.zeros(3), mask_T)
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(10.0)
    assert values_T.grad is not None
    assert values_T.grad.tolist() == [2.0, 0.0, 6.0]
    assert policy_loss_sum(torch.tensor([-1.0, nan, -2.0]), torch.tensor([2.0, 0, 0.5]), torch.ones(3)).item() == 3.0
    assert entropy_sum(torch.tensor([1.0, nan, 2.0]), mask_T).item() == 3.0
    assert reference_kl_sum(torch.tensor([-1.0, nan, -2.0]), torch.tensor([-1.0, 0.0, -2.0]), mask_T).item() == 0.0


def test_k3_is_unbiased_and_never_negative() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    estimates = k3_estimate(torch.log(q) - torch.log(p))
    assert (estimates >= 0).all()
    assert float((p * estimates).sum()) == pytest.approx(float((p * (p / q).log()).sum()))


def test_the_reference_term_pulls_towards_the_reference() -> None:
    logits = torch.tensor([2.0, 0.0], dtype=torch.float64, requires_grad=True)
    logp_T = torch.log_softmax(logits, -1)[:1]
    torch.autograd.backward(reference_kl_sum(logp_T, torch.tensor([math.log(0.5)]), torch.ones(1).bool()))
    assert logits.grad is not None
    assert logits.grad[0] > 0, "a token more likely than under the reference must become less so"


@pytest.mark.parametrize(("policy", "dropped"), [("mask_tokens", False), ("drop", True)])
def test_one_old_token_masks_or_drops(policy: str, dropped: bool) -> None:
    lag_T, mask_T = torch.tensor([99, 0, 5, 0]), torch.tensor([False, True, True, False])
    decision = judge_staleness(lag_T, mask_T, 4, "drop" if policy == "drop" else "mask_tokens")
    assert (decision.drop, decision.lag) == (dropped, 5)
    assert decision.stale_mask_T.tolist() == [False, False, True, False]


def _record(log_ratios: list[float], lags: list[int]) -> TokenRecord:
    log_ratio_A = torch.tensor(log_ratios)
    ones_A = torch.ones(len(log_ratios)).bool()
    _, stats = importance_weights(log_ratio_A, torch.zeros_like(log_ratio_A), ones_A, 0.3, 5.0)
    values_A = torch.full((len(log_ratios),), 0.5)
    return TokenRecord(DisStats(log_ratio_A, stats.verdict_A), torch.tensor(lags), values_A, values_A, None, 1.0)


def test_metrics_split_by_lag_and_stay_finite() -> None:
    numbers = token_metrics([_record([0.0, 1e4, -1e4, math.nan], [0, 1, 1, 7]), _record([0.0], [0])])
    assert numbers["dis_accepted_fraction"] == pytest.approx(2 / 5)
    assert numbers["dis_accepted_fraction.lag_0"] == 1.0
    assert numbers["dis_rejected_high_fraction.lag_1"] == numbers["dis_rejected_low_fraction.lag_1"] == 0.5
    assert numbers["dis_non_finite_fraction.lag_5_8"] == 1.0
    assert numbers["kl_rollout.lag_0"] == 0.0
    assert (numbers["lag_max"], numbers["reward_mean"], numbers["action_tokens"]) == (7.0, 1.0, 5.0)
    assert all(math.isfinite(value) for value in numbers.values())
    assert "kl_reference" not in numbers
    assert "dis_tokens.lag_2" not in numbers
