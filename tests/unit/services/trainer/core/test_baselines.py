"""Baselines of rewards, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.config.schema import MovingAverageSection, SpoSection
from services.trainer.core.baselines import Baseline, BetaTracker, MovingAverage, group_advantages, normalised

rewards = st.lists(st.floats(0, 1), min_size=2, max_size=16)


def test_a_group_is_compared_with_its_mean_in_units_of_its_spread() -> None:
    # mean 1/4; squared distances 9/16 + 3 x 1/16 = 3/4, over 3: variance 1/4, spread 1/2
    assert group_advantages([1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=3e-6)


@given(reward=st.floats(-10, 10), size=st.integers(2, 8))
def test_a_group_that_agrees_teaches_nothing(reward: float, size: int) -> None:
    assert group_advantages([reward] * size) == [0.0] * size


@given(rewards)
def test_advantages_of_a_group_and_of_an_update_sum_to_nothing(values: list[float]) -> None:
    assert sum(group_advantages(values)) == pytest.approx(0, abs=1e-6)
    assert sum(normalised(values)) == pytest.approx(0, abs=1e-6)


@given(rewards, st.integers(0, 15))
def test_where_a_rollout_stands_in_its_group_does_not_matter(values: list[float], turn: int) -> None:
    turn %= len(values)
    advantages = group_advantages(values)
    turned = group_advantages(values[turn:] + values[:turn])
    assert turned == pytest.approx(advantages[turn:] + advantages[:turn], rel=1e-6, abs=1e-6)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="a group of 1"):
        group_advantages([1.0])


def test_the_average_of_a_prompt_forgets_all_but_its_last_rewards() -> None:
    average = MovingAverage(MovingAverageSection(window=2))
    assert average.value("a") == 0.0
    for reward in (1.0, 0.0, 0.5):
        average.learn("a", reward, 0.0)
    assert average.value("a") == pytest.approx(0.25)
    assert average.value("b") == 0.0


def test_the_global_average_knows_no_prompts() -> None:
    average = MovingAverage(MovingAverageSection(scope="global"))
    average.learn("a", 1.0, 0.0)
    average.learn("b", 0.0, 0.0)
    assert average.value("c") == pytest.approx(0.5)


@pytest.mark.parametrize(("scope", "window"), [("prompt", 8), ("global", 128)])
def test_the_windows_are_the_papers(scope: str, window: int) -> None:
    average = MovingAverage(MovingAverageSection.model_validate({"scope": scope}))
    for _ in range(window):
        average.learn("a", 1.0, 0.0)
    for _ in range(window // 2):
        average.learn("a", 0.0, 0.0)
    assert average.value("a") == pytest.approx(0.5)


def test_the_tracker_counts_successes_and_forgets_as_the_policy_moves() -> None:
    tracker = BetaTracker(SpoSection(drift_half=0.06, rho_min=0.5, rho_max=0.9))
    assert tracker.value("a") == pytest.approx(1 / 2)
    tracker.learn("a", 1.0, 0.0)  # no drift: rho is 0.9; alpha 0.9 + 1, beta 0.9
    assert tracker.value("a") == pytest.approx(1.9 / 2.8)
    tracker.learn("a", 0.0, 1.0)  # far: rho is 0.5; alpha 0.95, beta 0.45 + 1
    assert tracker.value("a") == pytest.approx(0.95 / 2.4)


def test_half_of_it_is_forgotten_at_half_drift() -> None:
    tracker = BetaTracker(SpoSection(drift_half=0.06, rho_min=0.1, rho_max=1.0))
    tracker.learn("a", 1.0, 0.06)  # alpha 0.5 + 1, beta 0.5
    assert tracker.value("a") == pytest.approx(1.5 / 2.0)


def test_the_tracker_survives_an_infinite_drift_and_refuses_a_reward_that_is_no_chance() -> None:
    tracker = BetaTracker(SpoSection())
    tracker.learn("a", 1.0, math.inf)
    assert 0 < tracker.value("a") < 1
    with pytest.raises(ValueError, match=r"reward 1\.5, expected 0 to 1"):
        tracker.learn("a", 1.5, 0.0)


@pytest.mark.parametrize("new", [lambda: MovingAverage(MovingAverageSection()), lambda: BetaTracker(SpoSection())])
def test_what_is_saved_goes_on_as_if_nothing_had_happened(new: Callable[[], Baseline]) -> None:
    one, other = new(), new()
    for reward in (1.0, 0.0, 1.0, 1.0):
        one.learn("a", reward, 0.01)
    other.load(one.state())
    for baseline in (one, other):
        baseline.learn("a", 0.0, 0.01)
    assert other.value("a") == one.value("a")
