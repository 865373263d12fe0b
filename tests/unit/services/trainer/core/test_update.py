"""One update as a whole: its order, its refusals, and that a broken pass changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from services.trainer.backends.base import PolicyOutput
from services.trainer.backends.paired import PairedBackend
from services.trainer.core.update import TrajectoryTensors, Update, UpdateSettings, UpdateStats
from tests.unit.services.trainer.core.toy import same, states, toy_backend, toy_trajectory, with_lag


def run(
    backend: PairedBackend,
    settings: UpdateSettings,
    trajectories: list[TrajectoryTensors],
    *,
    critic_only: bool = False,
) -> UpdateStats:
    update = Update(backend, settings)
    update.begin(critic_only=critic_only)
    for trajectory in trajectories:
        update.accumulate(trajectory)
    return update.finish()


def test_the_order_of_calls_is_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = toy_backend()
    calls: list[str] = []

    def noted(name: str) -> Callable[..., object]:
        real = getattr(backend, name)

        def call(*arguments: object) -> object:
            calls.append(name)
            result: object = real(*arguments)
            return result

        return call

    passes = ("critic_forward", "critic_backward", "policy_forward", "policy_backward")
    for name in (*passes, "critic_step", "policy_step"):
        monkeypatch.setattr(backend, name, noted(name))
    run(backend, UpdateSettings(critic_updates=2), [toy_trajectory(toy_backend(), seed) for seed in (0, 1)])
    first_pass = [*passes] * 2
    second_pass = ["critic_forward", "critic_backward"] * 2
    assert calls == [*first_pass, "critic_step", *second_pass, "critic_step", "policy_step"]


def test_critic_only_moves_the_critic_alone() -> None:
    backend = toy_backend()
    policy, critic = backend.policy_state(), backend.critic_state()
    stats = run(backend, UpdateSettings(kl_coef=0.0), [toy_trajectory(backend, 0)], critic_only=True)
    assert stats.critic_only
    assert "policy_grad_norm" not in stats.metrics
    assert same(policy, backend.policy_state())
    assert not same(critic, backend.critic_state())


def test_a_non_finite_first_pass_changes_nothing() -> None:
    backend = toy_backend()
    before = states(backend)
    bad = replace(toy_trajectory(backend, 0), reward=math.nan)
    stats = run(backend, UpdateSettings(), [bad, toy_trajectory(backend, 1)])
    assert stats.skipped
    assert stats.skipped_reason == "loss of the first pass is not finite"
    assert stats.metrics["update_skipped"] == 1.0
    assert same(before, states(backend))


@pytest.mark.parametrize("failing_pass", [1, 2])
def test_a_non_finite_critic_gradient_restores_the_critic(monkeypatch: pytest.MonkeyPatch, failing_pass: int) -> None:
    backend = toy_backend()
    before = states(backend)
    real, passes = backend.critic_step, iter(range(1, 3))

    def poisoned(denominator: float) -> float:
        return real(math.nan if next(passes) == failing_pass else denominator)

    monkeypatch.setattr(backend, "critic_step", poisoned)
    stats = run(backend, UpdateSettings(), [toy_trajectory(backend, 0)])
    assert stats.skipped_reason == f"gradient of critic pass {failing_pass} is not finite"
    assert same(before, states(backend))


def test_a_non_finite_policy_gradient_restores_the_critic_and_the_next_update_is_clean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, untouched = toy_backend(), toy_backend()
    before = states(backend)
    real = backend.policy_backward

    def poisoned(loss_sum: Tensor) -> None:
        real(loss_sum * math.inf)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "policy_backward", poisoned)
        stats = run(backend, UpdateSettings(), [toy_trajectory(backend, 0)])
    assert stats.skipped_reason == "gradient of the policy is not finite"
    assert same(before, states(backend))
    for each in (backend, untouched):
        assert not run(each, UpdateSettings(), [toy_trajectory(each, 1)]).skipped
    assert same(states(backend), states(untouched)), "something of the skipped update was left behind"


def test_a_non_finite_second_critic_pass_restores_the_critic(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = toy_backend()
    before = states(backend)
    real, passes = backend.critic_forward, iter(range(1, 3))

    def poisoned(tokens_T: Tensor) -> Tensor:
        return real(tokens_T) * (math.nan if next(passes) == 2 else 1.0)

    monkeypatch.setattr(backend, "critic_forward", poisoned)
    stats = run(backend, UpdateSettings(), [toy_trajectory(backend, 0)])
    assert stats.skipped_reason == "loss of critic pass 2 is not finite"
    assert same(before, states(backend))


@pytest.mark.parametrize(("norm", "which"), [("none", "first pass"), ("whiten", "policy")])
def test_a_non_finite_policy_loss_alone_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, norm: Literal["none", "whiten"], which: str
) -> None:
    backend = toy_backend()
    before = states(backend)
    trajectory = toy_trajectory(backend, 0)
    real = backend.policy_forward

    def poisoned(tokens_T: Tensor, routes_TLK: Tensor | None) -> PolicyOutput:
        policy = real(tokens_T, routes_TLK)
        return policy._replace(entropy_T=policy.entropy_T * math.nan)

    monkeypatch.setattr(backend, "policy_forward", poisoned)
    stats = run(backend, UpdateSettings(entropy_coef=0.1, advantage_norm=norm), [trajectory])
    assert stats.skipped_reason == f"loss of the {which} is not finite"
    assert same(before, states(backend))


def test_a_dummy_has_no_effect() -> None:
    alone, padded = toy_backend(), toy_backend()
    trajectory = toy_trajectory(alone, 0)
    plain = run(alone, UpdateSettings(), [trajectory])
    filled = run(padded, UpdateSettings(), [trajectory, TrajectoryTensors.dummy()])
    assert same(states(alone), states(padded))
    assert len(filled.trajectories) == 1
    assert filled.metrics == plain.metrics
    with pytest.raises(ValueError, match="at least one action token, found none"):
        run(padded, UpdateSettings(), [TrajectoryTensors.dummy()])


def test_whitening_uses_the_moments_of_the_whole_update() -> None:
    backend = toy_backend()
    stats = run(backend, UpdateSettings(advantage_norm="whiten"), [toy_trajectory(backend, seed) for seed in range(4)])
    advantages_N = torch.cat([trajectory.advantages_A for trajectory in stats.trajectories])
    assert float(advantages_N.mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(advantages_N.std(correction=0)) == pytest.approx(1.0, abs=1e-6)
    assert stats.metrics["policy_grad_norm"] > 0


def test_sequence_mean_weighs_trajectories_not_tokens() -> None:
    """With two copies of one trajectory, the mean over sequences equals the one over tokens, and a lone one's too."""
    tokens, sequences = toy_backend(), toy_backend()
    twice = [toy_trajectory(tokens, 3)] * 2
    run(tokens, UpdateSettings(loss_aggregation="token_mean"), twice)
    run(sequences, UpdateSettings(loss_aggregation="sequence_mean"), twice)
    for name, tensor in states(tokens).items():
        torch.testing.assert_close(tensor, states(sequences)[name], rtol=0, atol=1e-9)

    uneven = [toy_trajectory(tokens, 3, length=5), toy_trajectory(tokens, 6, length=30)]
    by_token = run(toy_backend(), UpdateSettings(loss_aggregation="token_mean"), uneven)
    by_sequence = run(toy_backend(), UpdateSettings(loss_aggregation="sequence_mean"), uneven)
    assert by_token.metrics["policy_grad_norm"] != pytest.approx(by_sequence.metrics["policy_grad_norm"], rel=1e-3)


def test_a_stale_token_moves_the_policy_by_no_term() -> None:
    backend = toy_backend(reference=True)
    before = backend.policy_state()
    settings = UpdateSettings(kl_coef=0.5, entropy_coef=0.5, max_lag=4)
    stats = run(backend, settings, [with_lag(toy_trajectory(backend, 0), 5)])
    assert stats.metrics["dis_stale_fraction"] == 1.0
    assert same(before, backend.policy_state())


def test_the_kl_term_is_added_and_measured() -> None:
    free, tied = toy_backend(reference=True), toy_backend(reference=True)
    trajectory = toy_trajectory(free, 0)
    assert "kl_reference" not in run(free, UpdateSettings(), [trajectory]).metrics
    assert run(tied, UpdateSettings(kl_coef=1.0), [trajectory]).metrics["kl_reference"] > 0
    assert not same(free.policy_state(), tied.policy_state())


def test_stats_run_over_action_tokens_and_explain_the_update() -> None:
    backend = toy_backend()
    trajectory = with_lag(toy_trajectory(backend, 0, off_policy=0.5), 2)
    (stats,) = run(backend, UpdateSettings(), [trajectory]).trajectories
    actions = int(trajectory.action_mask_T.sum())
    for x_A in (stats.values_A, stats.advantages_A, stats.returns_A, stats.ratios_A, stats.weights_A):
        assert x_A.shape == (actions,)
    accepted_A = (stats.ratios_A > 0.7) & (stats.ratios_A < 6.0)
    torch.testing.assert_close(stats.weights_A, torch.where(accepted_A, stats.ratios_A, 0.0))
    assert (stats.returns_A - trajectory.reward).abs().max() < 1e-9
    assert (stats.lag, stats.reward) == (2, trajectory.reward)


def test_calls_outside_an_update_and_impossible_tensors_are_refused() -> None:
    backend = toy_backend()
    update, trajectory = Update(backend, UpdateSettings()), toy_trajectory(backend, 0)
    with pytest.raises(RuntimeError, match=r"accumulate\(\) outside an update"):
        update.accumulate(trajectory)
    update.begin()
    with pytest.raises(ValueError, match="first token is an action"):
        update.accumulate(replace(trajectory, action_mask_T=torch.ones(9).bool()))
    with pytest.raises(ValueError, match="expected one shape"):
        update.accumulate(replace(trajectory, lag_T=torch.zeros(3)))
    update.accumulate(trajectory)
    update.finish()
    with pytest.raises(RuntimeError, match=r"finish\(\) outside an update"):
        update.finish()


def test_the_critic_learns_what_separates_good_from_bad() -> None:
    backend = toy_backend()
    update = Update(backend, UpdateSettings(explained_variance_window=16))
    stats: UpdateStats | None = None
    for round_ in range(60):
        update.begin(critic_only=True)
        for seed in range(4):
            trajectory = toy_trajectory(backend, seed)
            trajectory.tokens_T[:] = seed % 2
            update.accumulate(replace(trajectory, reward=float(seed % 2)))
        stats = update.finish()
        assert round_ or stats.metrics["critic_loss"] > 0.1
    assert stats is not None
    assert stats.metrics["critic_loss"] < 0.01
    assert stats.metrics["explained_variance"] > 0.9


def test_the_window_goes_on_from_what_an_earlier_life_recorded() -> None:
    settings = UpdateSettings(gamma=0.9, lambda_critic=0.8)
    backend = toy_backend()
    whole, resumed = Update(backend, settings), Update(backend, settings)
    whole.begin()
    early = [whole.accumulate(replace(toy_trajectory(backend, seed), reward=float(seed))) for seed in range(3)]
    whole.finish()

    for stats in early:
        resumed.recall(stats.values_A.tolist(), stats.reward)
    found = []
    for update in (whole, resumed):
        torch.manual_seed(0)
        backend.snapshot_critic()
        update.begin(critic_only=True)
        update.accumulate(toy_trajectory(backend, 9))
        found.append(update.finish().metrics["explained_variance"])
        backend.restore_critic()
    assert found[0] == pytest.approx(found[1])
