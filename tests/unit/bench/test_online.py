"""How a switch is judged, on rewards made up for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bench.online import LEVEL_WINDOW, RECOVER_WITHIN, enough, followed, phases
from tests.support.update_rows import trained_row

PER_UPDATE = 4


def test_a_reward_that_returns_is_counted_up_to_the_update_that_ends_its_first_good_window() -> None:
    after = [0.1] * 80 + [0.9] * 200

    found = followed([0.8] * 100, after, PER_UPDATE)

    # The first window of 50 with a mean of 0.64 holds 34 good ones: it ends with trajectory 114, in update 29.
    assert found["recovered_after_updates"] == 29
    assert found["followed"]


def test_a_reward_that_stays_down_has_not_followed() -> None:
    found = followed([0.8] * 100, [0.5] * 600, PER_UPDATE)

    assert found["recovered_after_updates"] is None
    assert not found["followed"]


def test_too_late_is_shown_and_does_not_count() -> None:
    found = followed([0.8] * 100, [0.1] * (RECOVER_WITHIN * PER_UPDATE) + [0.9] * 100, PER_UPDATE)

    assert found["recovered_after_updates"] > RECOVER_WITHIN
    assert not found["followed"]


@given(st.integers(min_value=0, max_value=LEVEL_WINDOW - 1))
def test_less_than_a_window_shows_nothing(trajectories: int) -> None:
    assert not followed([0.8] * 100, [0.9] * trajectories, PER_UPDATE)["followed"]


def test_phases_go_by_the_preference_trained_under() -> None:
    rewards = [(1, 0.5), (2, 0.1), (2, 0.2)]
    rows = [trained_row(i, reward, scored_under=version) for i, (version, reward) in enumerate(rewards)]

    assert phases(rows) == [[0.5], [0.1, 0.2]]


def test_two_of_three_are_enough_and_the_rivals_do_not_count() -> None:
    shown = {"reinforce_ma-0": {"passed": True}, "reinforce_ma-1": {"passed": True}}
    one = {"sao-0": {"passed": True}, "sao-1": {"passed": False}, "sao-2": {"passed": False}}

    assert not enough(one | shown)
    assert enough(one | {"sao-2": {"passed": True}} | shown)
