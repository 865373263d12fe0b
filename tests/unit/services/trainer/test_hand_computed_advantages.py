"""The advantages that each algorithm's update used on recorded batches, against numbers worked out by hand.

The batches come from runs on the real engine (tools/record_batch.py): two updates of four trajectories of `sao`, one of
two groups of four of `grpo_dis`. Here they go from the stream through consumer, batcher and update. The numbers are in
tests/data/advantages, each with its working, to nine digits after the point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sao.config.algorithms import ALGORITHMS
from services.trainer.backends.base import PolicyOutput
from services.trainer.backends.torch_reference import TorchReferenceBackend
from services.trainer.core.update import TrajectoryStats, UpdateStats
from tests.support.recorded import Recorded, column, recorded, tables
from tests.support.training import ROOT, Trainer
from tests.unit.services.trainer.conftest import NewWorld

PAIR_OF_UPDATES = ("trainer.trajectories_per_update=4", "run.updates=2")
WITH_A_CRITIC = [name for name, it in ALGORITHMS.items() if it.has_critic]
IN_GROUPS = [name for name, it in ALGORITHMS.items() if it.in_groups]


async def started(new_world: NewWorld, batch: Sequence[Recorded], *sets: str) -> Trainer:
    """A trainer before which the batch lies on the stream, in its order."""
    world = new_world(*sets)
    for one in batch:
        message = one.sampled_in(world.config.run.name, ROOT)
        await world.deliver(message, one.outcome, place=(message.ordinal, message.sample))
    return await world.start()


async def trained(trainer: Trainer) -> list[TrajectoryStats]:
    """Run it to the end; what its updates computed from each trajectory, in the order of training."""
    finish = trainer.parts.ranks.finish
    updates: list[UpdateStats] = []

    def kept() -> UpdateStats:
        updates.append(finish())
        return updates[-1]

    trainer.parts.ranks.finish = kept  # type: ignore[method-assign]
    await trainer.run()
    assert not any(update.skipped for update in updates)
    return [one for update in updates for one in update.trajectories]


def says_what_was_recorded(backend: TorchReferenceBackend, batch: Sequence[Recorded]) -> None:
    """Give the batch's values and ratios in float64, where they are read, with the gradients of the real networks."""
    by_tokens = {tuple(one.trajectory.token_ids): one for one in batch}
    assert len(by_tokens) == len(batch), "two trajectories of the same tokens cannot be told apart"
    critic_forward, policy_forward = backend.critic_forward, backend.policy_forward

    def values(tokens_T: Tensor) -> Tensor:
        one = by_tokens[tuple(tokens_T.tolist())]
        return _with_gradient_of(critic_forward(tokens_T), on_actions(one, one.values))

    def policy(tokens_T: Tensor, routes_TLK: Tensor | None = None) -> PolicyOutput:
        one = by_tokens[tuple(tokens_T.tolist())]
        real = policy_forward(tokens_T, routes_TLK)
        logp_rollout_T = torch.tensor(one.trajectory.logprobs)  # float32, as the update reads it
        logp_T = logp_rollout_T.double() + on_actions(one, one.ratios, elsewhere=1.0).log()
        return PolicyOutput(_with_gradient_of(real.logp_T, logp_T), real.entropy_T)

    backend.critic_forward = values  # type: ignore[method-assign]
    backend.policy_forward = policy  # type: ignore[method-assign]


def on_actions(one: Recorded, numbers: Sequence[float], elsewhere: float = math.nan) -> Tensor:
    """[T] float64, `elsewhere` where the policy did not sample the token: NaN spoils whatever reads it."""
    mask_T = torch.tensor(one.trajectory.action_mask)
    found_T = torch.full(mask_T.shape, elsewhere, dtype=torch.float64)
    found_T[mask_T] = torch.tensor(numbers, dtype=torch.float64)
    return found_T


def _with_gradient_of(computed_T: Tensor, numbers_T: Tensor) -> Tensor:
    return numbers_T + (computed_T - computed_T.detach())


def to_nine_digits(numbers: Sequence[float]) -> object:
    return pytest.approx(numbers, rel=0, abs=1e-9)


def assert_one_advantage_each(stats: Sequence[TrajectoryStats], expected: Sequence[float]) -> None:
    """Every action token of a trajectory carries its one float32 number."""
    assert len(stats) == len(expected)
    for one, advantage in zip(stats, expected, strict=True):
        assert one.advantages_A.tolist() == pytest.approx([advantage] * len(one.advantages_A), rel=1e-6)


def assert_about(batch: Sequence[Recorded], prompts: Sequence[str], rewards: Sequence[float]) -> None:
    """The hand-worked rows have the batch's trajectories before them."""
    assert list(prompts) == [one.trajectory.message.prompt_id for one in batch]
    assert list(rewards) == [one.reward for one in batch]


@pytest.mark.parametrize("algorithm", WITH_A_CRITIC)
async def test_of_a_critic(algorithm: str, new_world: NewWorld) -> None:
    batch, worked = recorded("singles"), list(tables(algorithm).values())
    trainer = await started(new_world, batch, f"trainer.algorithm={algorithm}", *PAIR_OF_UPDATES)
    says_what_was_recorded(trainer.backend, batch)

    stats = await trained(trainer)

    for one, its, table in zip(batch, stats, worked, strict=True):
        assert its.values_A.tolist() == column(table, "V_j") == one.values
        assert its.advantages_A.tolist() == to_nine_digits(column(table, "A_j"))
        assert its.returns_A.tolist() == to_nine_digits(column(table, "G_j"))
        assert set(column(table, "G_j")) == {one.reward}


@pytest.mark.parametrize("algorithm", IN_GROUPS)
async def test_of_a_group(algorithm: str, new_world: NewWorld) -> None:
    batch, worked = recorded("groups"), tables("grpo")
    rows = [row for table in worked.values() for row in table]
    assert_about(batch, [prompt for prompt, table in worked.items() for _ in table], column(rows, "R_i"))
    sets = ("group.size=4", "trainer.trajectories_per_update=8", "run.updates=1")
    trainer = await started(new_world, batch, f"trainer.algorithm={algorithm}", *sets)

    assert_one_advantage_each(await trained(trainer), column(rows, "A_i"))


@pytest.mark.parametrize(("scope", "heading"), [("prompt", "Per prompt, window 8"), ("global", "Global, window 128")])
async def test_of_a_moving_average(scope: str, heading: str, new_world: NewWorld) -> None:
    batch, rows = recorded("singles"), tables("reinforce_ma")[heading]
    assert_about(batch, [row["prompt"] for row in rows], column(rows, "R"))
    sets = ("trainer.algorithm=reinforce_ma", f"moving_average.scope={scope}")
    trainer = await started(new_world, batch, *sets, *PAIR_OF_UPDATES)

    assert_one_advantage_each(await trained(trainer), column(rows, "A"))


async def test_of_a_tracker_and_what_it_learns(new_world: NewWorld) -> None:
    batch, worked = recorded("singles"), tables("spo")
    rows = worked["Update 1: advantages"] + worked["Update 2: advantages"]
    learned = worked["Update 1: what the tracker learns"] + worked["Update 2: what the tracker learns"]
    assert_about(batch, [row["prompt"] for row in rows], column(learned, "R"))
    trainer = await started(new_world, batch, "trainer.algorithm=spo", *PAIR_OF_UPDATES)
    says_what_was_recorded(trainer.backend, batch)

    assert_one_advantage_each(await trained(trainer), column(rows, "A"))

    state = trainer.parts.batcher.state()
    afterwards = {row["prompt"]: row for row in worked["The tracker afterwards"]}
    assert state.keys() == afterwards.keys()
    for prompt, counts in state.items():
        assert counts == to_nine_digits(column([afterwards[prompt]], "alpha") + column([afterwards[prompt]], "beta"))


def test_the_run_of_sao_used_these_itself() -> None:
    for one, table in zip(recorded("singles"), tables("sao").values(), strict=True):
        assert one.advantages == pytest.approx(column(table, "A_j"), rel=1e-6, abs=1e-7)  # in float32


def test_the_run_of_grpo_used_these_itself() -> None:
    expected = [advantage for table in tables("grpo").values() for advantage in column(table, "A_i")]
    for one, advantage in zip(recorded("groups"), expected, strict=True):
        assert one.advantages == pytest.approx([advantage] * one.trajectory.action_count, rel=1e-6)


def test_every_algorithm_is_here() -> None:
    assert {*WITH_A_CRITIC, *IN_GROUPS, "reinforce_ma", "spo"} == set(ALGORITHMS)
