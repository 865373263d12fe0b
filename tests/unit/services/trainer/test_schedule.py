"""Value pre-training, warm-up, training: when each ends, and that a restart changes nothing of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.config import ConfigError, load_run_config
from services.trainer.checkpoint import Progress
from services.trainer.loop import fresh_progress
from services.trainer.schedule import Gate, Phase, Plan, Pretraining, Schedule

SCHEDULE = Schedule(policy_lr=1e-4, critic_lr=1e-3, pretrain_trajectories=24, gate=0.2, window=16, warmup_updates=2)


def phases(schedule: Schedule, variances: Sequence[float | None], *, restarts: Sequence[int] = ()) -> list[Plan]:
    """The plans of as many updates of four trajectories, the process being restarted before some of them."""
    update = critic_only = 0
    pretraining = schedule.resumed(Pretraining())
    plans = []
    for number, variance in enumerate(variances):
        if number in restarts:
            pretraining = schedule.resumed(Pretraining.model_validate_json(pretraining.model_dump_json()))
        plan = schedule.plan(update, critic_only, pretraining)
        update += not plan.critic_only
        critic_only += plan.critic_only
        if plan.phase is Phase.PRETRAIN:
            pretraining = schedule.after(pretraining, 4, variance)
        plans.append(plan)
    return plans


def test_the_gate_is_judged_over_a_full_window_and_a_linear_ramp_follows() -> None:
    plans = phases(SCHEDULE, [0.9, 0.9, 0.9, 0.2, -1.0, -1.0, -1.0])

    assert [plan.phase for plan in plans] == [Phase.PRETRAIN] * 4 + [Phase.WARMUP] * 2 + [Phase.TRAIN]
    assert [plan.critic_lr for plan in plans] == pytest.approx([1e-3] * 4 + [0.5e-3, 1e-3, 1e-3])
    assert [plan.critic_only for plan in plans] == [True] * 6 + [False]
    assert {plan.policy_lr for plan in plans} == {1e-4}


@pytest.mark.parametrize("variance", [0.19, None])
def test_after_its_share_of_trajectories_pre_training_gives_up(variance: float | None) -> None:
    plans = phases(SCHEDULE, [variance] * 8)
    assert [plan.phase for plan in plans] == [Phase.PRETRAIN] * 6 + [Phase.WARMUP] * 2


@given(
    variances=st.lists(st.one_of(st.none(), st.floats(-2, 1)), min_size=12, max_size=12),
    restarts=st.sets(st.integers(0, 11)),
)
def test_restarts_change_nothing(variances: list[float | None], restarts: set[int]) -> None:
    assert phases(SCHEDULE, variances, restarts=sorted(restarts)) == phases(SCHEDULE, variances)


def test_without_a_critic_the_policy_trains_at_once() -> None:
    config = load_run_config(None, [], env={}, preset="paper-math")
    assert Schedule.of(config, has_critic=True).plan(0, 0, Pretraining()).phase is Phase.PRETRAIN

    schedule = Schedule.of(config, has_critic=False)
    pretraining = schedule.resumed(Pretraining())
    assert pretraining.gate is Gate.NONE
    assert schedule.plan(0, 0, pretraining).phase is Phase.TRAIN


def test_a_checkpoint_of_an_earlier_release_goes_on_with_its_warm_up() -> None:
    fields = fresh_progress("unit").model_dump(exclude={"pretraining"}) | {"critic_only": 1, "consumed": 4}
    old = Progress.model_validate(fields)

    pretraining = SCHEDULE.resumed(old.pretraining)

    assert SCHEDULE.plan(old.update, old.critic_only, pretraining) == Plan(Phase.WARMUP, 1e-4, 1e-3)
    assert SCHEDULE.plan(0, 2, pretraining).phase is Phase.TRAIN


def test_a_resume_with_fewer_trajectories_ends_pre_training_and_one_with_more_does_not_begin_it_again() -> None:
    begun = SCHEDULE.after(Pretraining(), 4, None)
    assert begun == Pretraining(gate=Gate.OPEN, updates=1, trajectories=4)
    none = Schedule(policy_lr=1e-4, critic_lr=1e-3, pretrain_trajectories=0, gate=0.2, window=16, warmup_updates=2)

    over = none.resumed(begun)

    assert over.gate is Gate.GAVE_UP
    assert none.plan(0, 1, over) == Plan(Phase.WARMUP, 1e-4, 0.5e-3)
    assert SCHEDULE.resumed(over) == over


def test_the_ranks_share_the_window() -> None:
    """Explained variance is rank 0's: its window holds one trajectory in `ranks`."""
    config = load_run_config(None, ["trainer.ranks=4", "critic.explained_variance_window=32"], env={})
    assert Schedule.of(config, has_critic=True).window == 128


def test_people_are_told_how_far_the_critic_is() -> None:
    def told(pretraining: Pretraining, variance: float | None, phase: Phase = Phase.PRETRAIN) -> str:
        return SCHEDULE.told(phase, 7, pretraining, variance)

    early = Pretraining(updates=2, trajectories=8)
    late = Pretraining(updates=5, trajectories=20)
    over = Pretraining(gate=Gate.GAVE_UP, updates=6, trajectories=24)
    assert told(early, 0.3) == "critic pre-training 8/24, explained variance 0.30 of 0.2, judged from 16 on"
    assert told(late, 0.123) == "critic pre-training 20/24, explained variance 0.12 of 0.2"
    assert told(over, None) == "critic pre-training gave up after 24 trajectories, explained variance undefined of 0.2"
    assert told(over, None, Phase.WARMUP) == "critic warm-up 1/2"
    assert told(over, None, Phase.TRAIN) == ""


def test_a_pre_training_that_cannot_be_judged_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"critic\.pretrain_trajectories.*never fill"):
        load_run_config(None, ["critic.pretrain_trajectories=63"], env={})
    load_run_config(None, ["critic.pretrain_trajectories=0"], env={})
