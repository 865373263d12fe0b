"""What the update does for algorithms other than SAO: given advantages, PPO, minibatches, copies, likelihood."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from services.trainer.backends.base import BackendError
from services.trainer.backends.paired import PairedBackend
from services.trainer.backends.torch_reference import TorchRole
from services.trainer.core.update import TrajectoryTensors, Update, UpdateSettings, UpdateStats
from tests.unit.services.trainer.core.toy import OPTIONS, ToyPolicy, same, states, toy_backend, toy_trajectory, with_lag

GRPO = UpdateSettings(has_critic=False, loss="ppo")
SURE = [0.5, -1.0, 0.25, -0.75]


def policy_only(seed: int = 0) -> PairedBackend:
    """The toy policy without a critic."""
    torch.manual_seed(seed)
    return PairedBackend(TorchRole(ToyPolicy(), OPTIONS), None, None, torch.device("cpu"))


def batch(off_policy: float = 0.0) -> list[TrajectoryTensors]:
    """Four trajectories with advantages of both signs."""
    return [
        replace(toy_trajectory(policy_only(), seed, off_policy=off_policy), advantage=advantage)
        for seed, advantage in enumerate(SURE)
    ]


def run(backend: PairedBackend, settings: UpdateSettings, trajectories: list[TrajectoryTensors]) -> UpdateStats:
    update = Update(backend, settings)
    update.begin()
    for trajectory in trajectories:
        update.accumulate(trajectory)
    return update.finish()


def surrogate_step(trajectories: list[TrajectoryTensors], settings: UpdateSettings, parts: int = 1) -> ToyPolicy:
    """PPO as its paper writes it, one loss for each minibatch, differentiated by autograd alone."""
    torch.manual_seed(0)
    policy = ToyPolicy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=OPTIONS.lr, betas=OPTIONS.betas, weight_decay=0.0)
    start = [policy(t.tokens_T)[0].detach() for t in trajectories]
    old = [t.logp_rollout_T for t in trajectories] if settings.ppo_old == "rollout" else start
    size = len(trajectories) // parts
    for first in range(0, len(trajectories), size):
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        for t, old_T in list(zip(trajectories, old, strict=True))[first : first + size]:
            assert t.advantage is not None
            ratio_A = torch.exp(policy(t.tokens_T)[0] - old_T)[t.action_mask_T]
            clipped_A = ratio_A.clamp(1 - settings.clip_low, 1 + settings.clip_high)
            total = total - torch.minimum(ratio_A * t.advantage, clipped_A * t.advantage).sum()
            tokens += int(t.action_mask_T.sum())
        optimizer.zero_grad()
        torch.autograd.backward(total / tokens)
        nn.utils.clip_grad_norm_(policy.parameters(), OPTIONS.gradient_clip)
        optimizer.step()
    return policy


@pytest.mark.parametrize("old", ["batch_start", "rollout"])
@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_ppo_is_the_papers_surrogate(old: str, minibatches: int) -> None:
    settings = replace(GRPO, ppo_old=old, minibatches=minibatches)  # type: ignore[arg-type]
    backend = policy_only()
    run(backend, settings, batch(off_policy=0.6))
    expected = dict(surrogate_step(batch(off_policy=0.6), settings, minibatches).named_parameters())
    for name, tensor in backend.policy_state().items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=0, atol=1e-9)


def test_with_one_step_a_batch_and_its_own_start_nothing_is_ever_clipped() -> None:
    stats = run(policy_only(), GRPO, batch(off_policy=3.0))
    assert all(set(one.weights_A.tolist()) == {1.0} for one in stats.trajectories)
    assert stats.metrics["dis_accepted_fraction"] == 1.0
    assert stats.metrics["ratio_max"] > 1.5, "the ratio to the rollout is still told"


def test_against_the_rollout_off_policy_tokens_are_clipped() -> None:
    stats = run(policy_only(), replace(GRPO, ppo_old="rollout"), batch(off_policy=3.0))
    assert 0 < stats.metrics["dis_accepted_fraction"] < 1


def test_a_copy_counts_as_much_as_the_same_trajectory_once_more() -> None:
    first, second, *_ = batch()
    twice, repeated = policy_only(), policy_only()
    run(twice, GRPO, [replace(first, copies=2), second])
    stats = run(repeated, GRPO, [first, first, second])
    for name, tensor in twice.policy_state().items():
        torch.testing.assert_close(tensor, repeated.policy_state()[name], rtol=0, atol=1e-12)
    assert len(stats.trajectories) == 3


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_copies_divide_as_they_multiply(aggregation: str) -> None:
    settings = replace(GRPO, loss_aggregation=aggregation)  # type: ignore[arg-type]
    once, thrice = (run(policy_only(), settings, [replace(batch()[0], copies=n)]) for n in (1, 3))
    assert thrice.metrics["policy_grad_norm"] == pytest.approx(once.metrics["policy_grad_norm"])
    assert thrice.metrics["policy_loss"] == pytest.approx(once.metrics["policy_loss"])


def test_without_a_critic_nothing_is_said_about_values() -> None:
    stats = run(policy_only(), GRPO, batch())
    assert {"critic_loss", "critic_grad_norm", "explained_variance", "value_mean"} & stats.metrics.keys() == set()
    assert all(len(one.values_A) == len(one.returns_A) == 0 for one in stats.trajectories)
    assert [one.advantages_A[0].item() for one in stats.trajectories] == SURE


def test_a_trajectory_without_an_advantage_is_refused_where_nobody_can_tell_it() -> None:
    with pytest.raises(ValueError, match="without an advantage"):
        run(policy_only(), GRPO, [replace(batch()[0], advantage=None)])


def test_the_critic_of_a_backend_that_has_none_is_refused_by_name() -> None:
    backend = policy_only()
    with pytest.raises(BackendError, match=r"trainer\.algorithm has none"):
        backend.critic_forward(torch.tensor([1, 2]))
    assert backend.critic_state() == {}
    assert set(backend.parameter_names_trained()) == {"policy"}


def test_a_broken_minibatch_takes_back_the_steps_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = toy_backend()
    before = states(backend)
    real, steps = backend.policy_step, iter(range(1, 3))

    def breaking(denominator: float) -> float:
        norm = real(denominator)
        return math.inf if next(steps) == 2 else norm

    monkeypatch.setattr(backend, "policy_step", breaking)
    trajectories = [toy_trajectory(backend, seed) for seed in range(4)]
    stats = run(backend, UpdateSettings(loss="ppo", critic_updates=1, minibatches=2), trajectories)
    assert stats.skipped_reason == "gradient of the policy is not finite"
    assert same(before, states(backend))


def test_stale_tokens_are_masked_for_every_loss() -> None:
    backend = policy_only()
    before = backend.policy_state()
    stats = run(backend, GRPO, [with_lag(one, 5) for one in batch()])
    assert stats.metrics["dis_stale_fraction"] == 1.0
    assert same(before, backend.policy_state())


def test_the_likelihood_term_imitates_only_what_was_right() -> None:
    settings = replace(GRPO, nll_coef=0.1)
    wrong, right = (replace(batch()[1], advantage=0.0, reward=reward) for reward in (0.5, 1.0))
    unmoved, moved = policy_only(), policy_only()
    start = unmoved.policy_state()
    run(unmoved, settings, [wrong])
    run(moved, settings, [right])
    assert same(start, unmoved.policy_state())
    mask_T = right.action_mask_T
    before = policy_only().policy_evaluate(right.tokens_T).logp_T[mask_T].sum()
    assert moved.policy_evaluate(right.tokens_T).logp_T[mask_T].sum() > before


def test_whitened_advantages_reach_ppo() -> None:
    stats = run(toy_backend(), UpdateSettings(loss="ppo", advantage_norm="whiten"), [toy_trajectory(toy_backend(), 0)])
    advantages = stats.trajectories[0].advantages_A
    assert advantages.mean().item() == pytest.approx(0, abs=1e-9)
