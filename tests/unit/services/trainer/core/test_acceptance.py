"""The ten acceptance items of the algorithm, one test each, by number."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from services.trainer.core.dis import Verdict, importance_weights
from services.trainer.core.gae import skip_observation_gae
from services.trainer.core.losses import policy_loss_sum
from services.trainer.core.staleness import judge_staleness
from services.trainer.core.update import Update, UpdateSettings
from tests.support import float64_oracle as oracle
from tests.support.one_batch_training import OneBatchTrainer, every_fate, one_by_one, uneven_trajectories
from tests.unit.services.trainer.core.toy import OPTIONS, VOCABULARY, states, toy_backend, toy_trajectory, with_lag

masks = st.lists(st.booleans(), min_size=1, max_size=30).map(lambda mask: [False, *mask, True])
unit = st.floats(0.0, 1.0)
moderate = st.floats(-10.0, 10.0)


@given(mask=masks, reward=moderate, gamma=unit, lam=unit, seed=st.integers(0, 2**31))
def test_01_advantages_equal_compact_then_textbook_gae(
    mask: list[bool], reward: float, gamma: float, lam: float, seed: int
) -> None:
    values_T = torch.randn(len(mask), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    mask_T = torch.tensor(mask)
    advantages_T, _ = skip_observation_gae(values_T, mask_T, reward, gamma, lam)
    advantages, _ = oracle.skip_observation_gae(values_T.tolist(), mask, reward, gamma, lam)
    expected = torch.tensor(advantages, dtype=torch.float64)
    torch.testing.assert_close(advantages_T, expected, rtol=1e-9, atol=1e-9)

    elsewhere_T = torch.where(mask_T, values_T, values_T + 100.0)
    moved_T, _ = skip_observation_gae(elsewhere_T, mask_T, reward, gamma, lam)
    assert torch.equal(moved_T, advantages_T), "an observation token's value reached an advantage"


@given(mask=masks, reward=moderate, seed=st.integers(0, 2**31))
def test_02_without_discounting_every_return_is_the_reward(mask: list[bool], reward: float, seed: int) -> None:
    values_T = torch.randn(len(mask), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    mask_T = torch.tensor(mask)
    _, returns_T = skip_observation_gae(values_T, mask_T, reward, 1.0, 1.0)
    expected_T = mask_T.double() * reward
    torch.testing.assert_close(returns_T, expected_T, rtol=0, atol=1e-9)


@given(tail=st.integers(1, 5), reward=st.floats(0.5, 10.0), gamma=unit, lam=unit)
def test_03_a_trajectory_that_ends_in_an_observation_keeps_its_reward(
    tail: int, reward: float, gamma: float, lam: float
) -> None:
    mask_T = torch.tensor([False, True, False, True] + [False] * tail)
    values_T = torch.zeros(len(mask_T), dtype=torch.float64)
    advantages_T, returns_T = skip_observation_gae(values_T, mask_T, reward, gamma, lam)
    assert advantages_T[3] == returns_T[3] == reward
    assert advantages_T[1] == pytest.approx(gamma * lam * reward)


def test_04_the_gradient_is_weight_times_advantage_times_score() -> None:
    draw = torch.Generator().manual_seed(4)
    logits_TV = torch.randn(6, 5, dtype=torch.float64, generator=draw)
    tokens_T = torch.randint(5, (6,), generator=draw)
    advantages_T = torch.randn(6, dtype=torch.float64, generator=draw)
    mask_T = torch.tensor([False, True, True, False, True, True])
    start_T = torch.log_softmax(logits_TV, -1)[range(6), tokens_T]
    rollout_T = start_T - torch.tensor([0.0, 0.1, -0.2, 0.0, 9.0, -9.0])
    weight_T, _ = importance_weights(start_T, rollout_T, mask_T, 0.3, 5.0)
    assert (weight_T != 0).tolist() == [False, True, True, False, False, False]

    def logp(shift: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits_TV + shift, -1)[range(6), tokens_T]

    leaf = torch.zeros_like(logits_TV, requires_grad=True)
    torch.autograd.backward(policy_loss_sum(logp(leaf), weight_T, advantages_T))
    step = 1e-6
    numeric = torch.zeros_like(logits_TV)
    for index in torch.cartesian_prod(torch.arange(6), torch.arange(5)).tolist():
        shift = torch.zeros_like(logits_TV)
        shift[tuple(index)] = step
        score_T = (logp(shift) - logp(-shift)) / (2 * step)
        numeric[tuple(index)] = -(weight_T * advantages_T * score_T).sum()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, numeric, rtol=1e-6, atol=1e-8)


@given(eps_low=st.floats(0.01, 1.0), eps_high=st.floats(0.01, 10.0))
def test_05_bounds_are_strict(eps_low: float, eps_high: float) -> None:
    low = math.log1p(-eps_low) if eps_low < 1 else -math.inf
    high = math.log1p(eps_high)
    at = [low, math.nextafter(low, math.inf), math.nextafter(high, -math.inf), high]
    ratios_T = torch.tensor(at, dtype=torch.float64)
    weight_T, _ = importance_weights(ratios_T, torch.zeros_like(ratios_T), torch.ones(4).bool(), eps_low, eps_high)
    # exp may underflow to 0 next to log 0, which no finite ratio reaches: only finite lower bounds are asked about.
    inside = [False, eps_low < 1, True, False]
    assert (weight_T != 0).tolist() == inside


def test_06_at_lag_zero_ratios_are_one_and_nothing_is_rejected() -> None:
    backend = toy_backend()
    update = Update(backend, UpdateSettings())
    update.begin()
    for seed in range(8):
        update.accumulate(toy_trajectory(backend, seed, off_policy=1e-3, length=30))
    metrics = update.finish().metrics
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert 1.0 - metrics["dis_accepted_fraction"] < 0.01
    assert metrics["kl_rollout.lag_0"] < 1e-5


@pytest.mark.parametrize("shift", [1e4, -1e4, math.inf, -math.inf, math.nan])
def test_07_all_rejected_gives_a_zero_finite_gradient(shift: float) -> None:
    logp_T = torch.tensor([0.0, -1.0, -2.0], requires_grad=True)
    rollout_T = torch.tensor([0.0, -1.0, -2.0]) - shift
    mask_T = torch.tensor([False, True, True])
    weight_T, stats = importance_weights(logp_T, rollout_T, mask_T, 0.3, 5.0)
    torch.autograd.backward(policy_loss_sum(logp_T, weight_T, torch.ones(3)))
    assert logp_T.grad is not None
    assert logp_T.grad.tolist() == [0.0, 0.0, 0.0]
    assert weight_T.tolist() == [0.0, 0.0, 0.0]
    assert not weight_T.requires_grad
    assert stats.count(Verdict.ACCEPTED) == 0

    backend = toy_backend()
    trajectory = toy_trajectory(backend, 1)
    trajectory.logp_rollout_T.sub_(shift)
    update = Update(backend, UpdateSettings())
    before = backend.policy_state()
    update.begin()
    update.accumulate(trajectory)
    stats_of_update = update.finish()
    assert not stats_of_update.skipped
    assert stats_of_update.metrics["policy_grad_norm"] == 0.0
    assert all(math.isfinite(value) for value in stats_of_update.metrics.values())
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.policy_state().items())


def test_08_frozen_critic_tensors_are_bit_identical_after_training() -> None:
    backend = toy_backend()
    before = backend.critic_state()
    update = Update(backend, UpdateSettings())
    for round_ in range(5):
        update.begin()
        update.accumulate(toy_trajectory(backend, round_))
        assert not update.finish().skipped
    after = backend.critic_state()
    trained = set(backend.parameter_names_trained()["critic"])
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained
    assert "embed.weight" not in trained


@given(lags=st.lists(st.integers(0, 20), min_size=9, max_size=9), max_lag=st.integers(0, 12))
def test_09_no_token_older_than_the_limit_carries_weight(lags: list[int], max_lag: int) -> None:
    backend = toy_backend()
    trajectory = with_lag(toy_trajectory(backend, 3), 0)
    trajectory.lag_T.copy_(torch.tensor(lags))
    mask_T = trajectory.action_mask_T
    decision = judge_staleness(trajectory.lag_T, mask_T, max_lag, "mask_tokens")
    update = Update(backend, UpdateSettings(max_lag=max_lag))
    update.begin()
    stats = update.accumulate(trajectory)
    old_A = trajectory.lag_T[mask_T] > max_lag
    assert (stats.weights_A[old_A] == 0).all()
    assert (stats.weights_A[~old_A] != 0).all()
    assert decision.drop == bool(old_A.all())
    assert torch.equal(decision.stale_mask_T[mask_T], old_A)


@pytest.mark.parametrize("size", [1, 7, 32])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_10_accumulating_one_by_one_equals_one_batch(
    size: int, aggregation: Literal["token_mean", "sequence_mean"]
) -> None:
    """Twice: what the first update leaves behind must not reach the second."""
    settings = UpdateSettings(
        gamma=0.97, lambda_critic=0.9, loss_aggregation=aggregation, kl_coef=0.05, entropy_coef=0.01
    )
    options = replace(OPTIONS, gradient_clip=0.05, weight_decay=0.01)
    backend = toy_backend(seed=10, reference=True, options=options)
    policy, critic, reference = copy.deepcopy((backend._policy.module, backend._critic.module, backend._reference))
    assert isinstance(reference, nn.Module)
    batch = OneBatchTrainer(policy, critic, reference, settings, options)
    update = Update(backend, settings)
    for round_ in range(2):
        trajectories = uneven_trajectories(backend, VOCABULARY, size, seed=2 * size + round_)
        (found, stats), expected = one_by_one(backend, update, trajectories), batch.update(trajectories)
        assert len(expected["critic"]) == settings.critic_updates
        for role, norms in expected.items():
            assert found[role] == pytest.approx(norms, rel=1e-9)
            assert min(norms) > options.gradient_clip, "clipping belongs into this test"
        assert size == 1 or every_fate(stats), "rejected and stale tokens belong into this test"
        tensors = states(backend)
        for name, tensor in batch.states().items():
            torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-9, msg=name)
