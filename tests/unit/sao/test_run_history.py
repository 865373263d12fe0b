"""The run's course that viewers follow, against the arithmetic over the whole file."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sao.adaptation import Served, note_served
from sao.curves import (
    SERVED_WITHIN,
    Courses,
    adaptations,
    effective_rows,
    preference_switches,
    reward_curve,
    trained,
)
from sao.preference import Preference, PreferenceDocument
from sao.rows import UpdateRow
from sao.run_history import HistoryPoint, RunHistory
from tests.support.update_rows import rows_of, trained_row, update_row

anywhere = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)


def lines(rows: list[UpdateRow]) -> bytes:
    return b"".join(row.model_dump_json().encode() + b"\n" for row in rows)


def followed(path: Path, data: bytes, cuts: list[int], max_points: int = 16) -> RunHistory:
    """A history that looked at the file at each of these sizes, and at the end."""
    history = RunHistory(path, max_points=max_points)
    for size in [*sorted(cuts), len(data)]:
        path.write_bytes(data[:size])
        history.poll()
    return history


@given(st.lists(st.floats(-2, 2), max_size=130), st.integers(1, 7), st.lists(st.integers(0, 30_000), max_size=4))
@anywhere
def test_every_point_is_the_moving_average_however_the_file_grew(
    tmp_path: Path, rewards: list[float], per_update: int, cuts: list[int]
) -> None:
    rows = rows_of(rewards, per_update)
    data = lines(rows)
    history = followed(tmp_path / "rows", data, [cut for cut in cuts if cut < len(data)])
    curves = history.curves()

    assert history.trajectories == len(rewards)
    assert [point.trajectory for point in curves.points] == list(range(curves.stride, len(rewards) + 1, curves.stride))
    assert len(curves.points) <= 16
    for point in [*curves.points, *([curves.latest] if curves.latest else [])]:
        window = rewards[max(0, point.trajectory - 100) : point.trajectory]
        assert point.moving_average == pytest.approx(fmean(window), abs=1e-9)
    exact = {point.trajectory: point for point in reward_curve(rows)}
    for point in curves.points:
        if point.trajectory in exact:
            assert (point.update, point.wall_s) == (exact[point.trajectory].update, exact[point.trajectory].wall_s)


def test_a_reader_that_keeps_up_has_the_points_of_one_that_came_late(tmp_path: Path) -> None:
    """As the console does: ask for what is new, forget what the stride has passed."""
    path = tmp_path / "rows"
    history = RunHistory(path, max_points=8)
    rows = rows_of([number % 7 / 7 for number in range(200)], per_update=3)
    points: list[HistoryPoint] = []
    for count in range(1, len(rows) + 1):
        path.write_bytes(lines(rows[:count]))
        history.poll()
        curves = history.curves(points[-1].trajectory if points else 0)
        points = [point for point in points if point.trajectory % curves.stride == 0] + curves.points

    assert points == followed(tmp_path / "late", lines(rows), [], 8).curves().points
    assert points[-1].trajectory > 190 - curves.stride


def test_an_abandoned_branch_is_forgotten_and_a_new_history_begins(tmp_path: Path) -> None:
    branch = [update_row(update, [trained_row(update, 0.0)]) for update in range(1, 11)]
    again = [update_row(update, [trained_row(100 + update, 1.0)], epoch=2) for update in range(6, 9)]
    history = followed(tmp_path / "rows", lines(branch + again), [len(lines(branch))])

    kept = trained(effective_rows(branch + again))
    assert history.trajectories == len(kept) == 8
    assert history.average == pytest.approx(3 / 8)
    assert history.history == 2
    assert [history.counts(row) for row in branch] == [True] * 5 + [False] * 5
    assert history.newest_ids == {trajectory.id for _, trajectory in kept}


def test_a_restart_that_goes_on_where_it_ended_is_no_new_history(tmp_path: Path) -> None:
    rows = [update_row(1, [trained_row(1, 0.0)]), update_row(2, [trained_row(2, 1.0)], epoch=2)]
    history = followed(tmp_path / "rows", lines(rows), [])

    assert (history.history, history.trajectories) == (0, 2)


def test_switches_are_those_of_the_report(tmp_path: Path) -> None:
    versions = [1, 1, 2, 1, 2, 3]
    rows = [update_row(n, [trained_row(n, 0.5, scored_under=version)]) for n, version in enumerate(versions, start=1)]
    history = followed(tmp_path / "rows", lines(rows), [])

    assert history.curves().switches == preference_switches(rows)


@given(
    st.lists(st.tuples(st.floats(-0.5, 1), st.integers(1, 4)), max_size=160),
    st.integers(1, 5),
    st.lists(st.integers(0, 60_000), max_size=4),
    st.data(),
)
@anywhere
def test_adaptation_is_that_of_the_report_however_the_files_grew(
    tmp_path: Path, trained_under: list[tuple[float, int]], per_update: int, cuts: list[int], draw: st.DataObject
) -> None:
    made = [trained_row(n, reward, scored_under=under) for n, (reward, under) in enumerate(trained_under, start=1)]
    groups = [made[start : start + per_update] for start in range(0, len(made), per_update)]
    rows = [update_row(update, group) for update, group in enumerate(groups, start=1)]
    at_s = {row.version: row.finished_s + draw.draw(st.floats(0, 50)) for row in rows if draw.draw(st.booleans())}
    data, path, history = lines(rows), tmp_path / "rows", RunHistory(tmp_path / "rows")
    served = tmp_path / "served.jsonl"
    served.write_bytes(b"")
    told = list(at_s.items())
    for size in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        path.write_bytes(data[:size])
        ready = len(told) if size == len(data) else draw.draw(st.integers(0, len(told)))
        for version, moment in told[:ready]:
            note_served(tmp_path, Served(version=version, engine="e", at_s=moment))
        told = told[ready:]
        history.poll()

    document = PreferenceDocument(name="p", weights={"a": 1.0})
    kept = [Preference(version=version, document=document, stored_s=990.0) for version in range(1, 5)]
    assert [history.adaptation(one) for one in kept[1:]] == adaptations(rows, kept, at_s)


def test_a_serving_far_from_its_update_is_found_among_the_first_versions_alone() -> None:
    courses = Courses()
    preference = Preference(version=1, document=PreferenceDocument(name="p", weights={"a": 1.0}), stored_s=1.0)
    for row in rows_of([0.5] * (4 * SERVED_WITHIN + 8)):
        courses.take(row)
    courses.serve(f"v{SERVED_WITHIN + 1:08d}", 2000.0)
    assert courses.adaptation(preference).first_served_s is None
    courses.serve(f"v{SERVED_WITHIN:08d}", 3000.0)
    assert courses.adaptation(preference).first_served_s == 2999.0


def test_components_are_means_over_those_that_have_them(tmp_path: Path) -> None:
    parts: list[dict[str, float]] = [{}, {"cute": 1.0}, {"cute": 0.0, "quality": 1.0}]
    ones = [trained_row(n, 0.5).model_copy(update={"components": part}) for n, part in enumerate(parts)]
    history = followed(tmp_path / "rows", lines([update_row(1, ones)]), [])

    assert history.components == {"cute": 0.5, "quality": 1.0}


def test_it_reads_on_where_its_time_was_up(tmp_path: Path) -> None:
    path, seconds = tmp_path / "rows", iter(range(1000))
    path.write_bytes(lines(rows_of([0.5] * 40)))
    history = RunHistory(path, clock=lambda: next(seconds))
    seen = []
    while not history.caught_up:
        history.poll(budget_s=2)
        seen.append(history.trajectories)

    assert history.trajectories == 40
    assert 0 < seen[0] < 40
    assert not RunHistory(path).curves().caught_up


def test_another_file_under_the_same_name_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    history = followed(path, lines(rows_of([0.0] * 40)), [])
    path.write_bytes(lines(rows_of([1.0] * 4)))
    history.poll()

    assert (history.trajectories, history.average) == (4, 1.0)


def test_rates_and_lag_are_of_the_last_minute_and_the_last_update(tmp_path: Path) -> None:
    rows = [update_row(n, [trained_row(n, 0.5, lag=n)]) for n in range(1, 100)]
    history = followed(tmp_path / "rows", lines(rows), [])

    assert history.trajectories_per_s == pytest.approx(1.0)
    assert history.tokens_per_s == pytest.approx(20.0)
    assert history.lag == 99
    assert RunHistory(tmp_path / "none").lag is None
