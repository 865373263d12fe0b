"""The report's arithmetic against its definitions."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.curves import (
    dropped,
    effective_rows,
    lag_histogram,
    moving_average,
    preference_switches,
    rejected_share,
    reward_curve,
    trained,
)
from sao.rows import UpdateRow
from tests.support.update_rows import rows_of, trained_row, update_row

rewards = st.lists(st.floats(-10, 10), max_size=260)


@given(rewards, st.integers(1, 120))
def test_a_moving_average_is_the_mean_of_each_window(values: list[float], window: int) -> None:
    averages = moving_average(values, window)

    assert len(averages) == max(0, len(values) - window + 1)
    for i, average in enumerate(averages):
        assert average == pytest.approx(fmean(values[i : i + window]), abs=1e-9)


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        moving_average([1.0], 0)


@given(rewards, st.integers(1, 7))
def test_the_curve_starts_at_trajectory_100_and_has_one_point_for_each_one_after(
    values: list[float], per_update: int
) -> None:
    curve = reward_curve(rows_of(values, per_update))

    assert [point.trajectory for point in curve] == list(range(100, len(values) + 1))
    for point in curve:
        assert point.reward == values[point.trajectory - 1]
        assert point.moving_average == pytest.approx(fmean(values[point.trajectory - 100 : point.trajectory]), abs=1e-9)
        assert point.update == (point.trajectory - 1) // per_update + 1
        assert point.wall_s == point.trajectory - 1  # one is consumed each second


def test_wall_time_counts_from_the_first_trajectory_consumed_not_the_first_listed() -> None:
    row = update_row(1, [trained_row(1, 1.0, consumed_s=50.0), trained_row(2, 1.0, consumed_s=40.0)])

    assert [point.wall_s for point in reward_curve([row], window=1)] == [10.0, 0.0]


@given(st.lists(st.floats(0, 1), min_size=8, max_size=80), st.data())
def test_updates_done_again_after_a_fall_back_count_once(values: list[float], data: st.DataObject) -> None:
    first = rows_of(values)
    resumed_at = data.draw(st.integers(0, len(first) - 1))
    again = [row.model_copy(update={"trainer_epoch": 2}) for row in first[resumed_at:]]

    assert effective_rows([*first, *again]) == [*first[:resumed_at], *again]


def test_rows_beyond_the_point_of_resumption_are_history_even_with_other_trajectories() -> None:
    first = rows_of([1.0] * 12)
    again = update_row(2, [trained_row(90, 0.5)], epoch=2)

    assert effective_rows([*first, again]) == [first[0], again]


def test_a_critic_warm_up_keeps_its_update_number_and_its_trajectories_count() -> None:
    rows = [
        update_row(0, [trained_row(1, 0.0)], critic_only=True),
        update_row(0, [trained_row(2, 0.0)], critic_only=True),
        update_row(1, [trained_row(3, 1.0)]),
    ]

    assert effective_rows(rows) == rows
    assert [row.update for row, _ in trained(rows)] == [0, 0, 1]


def test_a_warm_up_step_that_was_made_again_counts_once_whatever_it_was_made_of() -> None:
    def warm(number: int, step: int, epoch: int) -> UpdateRow:
        metrics = {"critic_only_updates": float(step)}
        return update_row(0, [trained_row(number, 0.0)], critic_only=True, epoch=epoch, metrics=metrics)

    first = [warm(number, number, 1) for number in (1, 2, 3)]
    again = [warm(90, 2, 2), warm(3, 3, 2)]

    assert effective_rows([*first, *again]) == [first[0], *again]


def test_a_switch_is_where_a_higher_preference_version_first_appears() -> None:
    under = [1, 1, 2, 1, 2, 2, 3]
    rows = [update_row(n, [trained_row(n, 0.5, scored_under=version)]) for n, version in enumerate(under, start=1)]

    switches = preference_switches(rows)

    assert [(s.from_version, s.to_version, s.trajectory) for s in switches] == [(1, 2, 3), (2, 3, 7)]
    assert switches[0].wall_s == 2.0


@given(st.lists(st.integers(0, 6), min_size=1, max_size=50))
def test_the_lag_histogram_holds_every_trajectory(lags: list[int]) -> None:
    rows = [update_row(n, [trained_row(n, 0.0, lag=lag)]) for n, lag in enumerate(lags, start=1)]

    histogram = lag_histogram(rows)

    assert histogram == {lag: lags.count(lag) for lag in sorted(set(lags))}
    assert list(histogram) == sorted(histogram)


@given(st.lists(st.dictionaries(st.sampled_from(["stale", "invalid"]), st.integers(1, 9)), max_size=12))
def test_drops_are_the_sum_of_what_happened_whichever_trainer_counted(increments: list[dict[str, int]]) -> None:
    running: dict[str, int] = {}
    rows = []
    for number, increment in enumerate(increments, start=1):
        running = {reason: running.get(reason, 0) + increment.get(reason, 0) for reason in running | increment}
        rows.append(update_row(number, [trained_row(number, 0.0)], dropped=dict(running)))

    assert dropped(rows) == dict(sorted(running.items()))


def test_drops_go_on_from_where_they_were_when_a_new_trainer_counts_from_nothing() -> None:
    rows = [
        update_row(1, [trained_row(1, 0.0)], dropped={"stale": 3}),
        update_row(2, [trained_row(2, 0.0)], dropped={"stale": 1}, epoch=2),
        update_row(3, [trained_row(3, 0.0)], dropped={"stale": 2}, epoch=2),
    ]

    assert dropped(rows) == {"stale": 5}


def test_the_rejected_share_is_what_was_not_accepted_and_none_when_unknown() -> None:
    assert rejected_share(update_row(1, [], metrics={"dis_accepted_fraction": 0.75})) == 0.25
    assert rejected_share(update_row(1, [])) is None
