"""How fast a run followed a preference, against the definitions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.adaptation import FirstUse, Served, first_served, kept_preferences, note_served
from sao.curves import RECOVERED, RECOVERY_WINDOW, adaptations
from sao.preference import Preference, PreferenceDocument
from sao.preference_changes import PreferenceChange
from sao.rows import UpdateRow
from tests.support.update_rows import trained_row, update_row


def preference(version: int, stored_s: float) -> Preference:
    return Preference(
        version=version, document=PreferenceDocument(name=f"p{version}", weights={"a": 1.0}), stored_s=stored_s
    )


def run_of(rewards: Sequence[tuple[float, int]], per_update: int) -> list[UpdateRow]:
    """Updates of trajectories with these (reward, preference version)s; number n is consumed at second 1000 + n."""
    made = [trained_row(n, reward, scored_under=under) for n, (reward, under) in enumerate(rewards, start=1)]
    groups = [made[start : start + per_update] for start in range(0, len(made), per_update)]
    return [update_row(update, group) for update, group in enumerate(groups, start=1)]


@given(
    before=st.lists(st.floats(-0.5, 1), max_size=120),
    after=st.lists(st.floats(-0.5, 1), max_size=160),
    per_update=st.integers(1, 7),
)
def test_recovery_is_the_first_window_under_the_new_preference_at_its_share_of_the_last_one_before(
    before: list[float], after: list[float], per_update: int
) -> None:
    rows = run_of([*((reward, 1) for reward in before), *((reward, 2) for reward in after)], per_update)
    switched = [preference(1, 1.0), preference(2, 900.0)]

    (found,) = adaptations(rows, switched, {})

    known = len(before) >= RECOVERY_WINDOW and fmean(before[-RECOVERY_WINDOW:]) > 0 and len(after) > 0
    level = fmean(before[-RECOVERY_WINDOW:]) if known else None
    assert found.level_before == (pytest.approx(level) if level is not None else None)
    windows = [after[:end][-RECOVERY_WINDOW:] for end in range(RECOVERY_WINDOW, len(after) + 1)]
    hit = next((n for n, one in enumerate(windows) if level is not None and fmean(one) >= RECOVERED * level), None)
    if hit is None:
        assert (found.recovered_s, found.recovered_updates) == (None, None)
    else:
        number = len(before) + RECOVERY_WINDOW + hit
        row = next(row for row in rows if row.trajectories[-1].ordinal >= number)
        first = next(row for row in rows if any(one.trained_under == 2 for one in row.trajectories))
        assert found.recovered_s == row.finished_s - 900.0
        assert found.recovered_updates == row.update - first.update + 1


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 5), st.data())
def test_the_first_uses_count_from_the_put(before: int, after: int, per_update: int, data: st.DataObject) -> None:
    rows = run_of([(1.0, 1)] * before + [(1.0, 2)] * after, per_update)
    names = [row.version for row in rows]
    served = {name: data.draw(st.floats(1001, 2000)) for name in names if data.draw(st.booleans())}

    (found,) = adaptations(rows, [preference(1, 1.0), preference(2, 990.0)], served)

    if after == 0:
        assert (found.first_scored_s, found.first_trained_s, found.first_served_s) == (None, None, None)
        return
    first = next(n for n, row in enumerate(rows) if any(one.trained_under == 2 for one in row.trajectories))
    assert found.first_scored_s == 999.0 + before + 1 - 990.0
    assert found.first_trained_s == rows[first].finished_s - 990.0
    times = [served[name] for name in names[first:] if name in served]
    assert found.first_served_s == (min(times) - 990.0 if times else None)


def test_a_straggler_under_the_old_preference_is_no_part_of_the_recovery() -> None:
    rewards = [(1.0, 1)] * 50 + [(0.9, 2)] * 25 + [(0.0, 1)] * 20 + [(0.9, 2)] * 25
    (found,) = adaptations(run_of(rewards, 1), [preference(1, 1.0), preference(2, 1000.0)], {})
    assert found.recovered_updates == 70


def test_each_switch_has_its_own_level() -> None:
    rewards = [(0.2, 1)] * 50 + [(0.8, 2)] * 50 + [(0.5, 3)] * 60 + [(0.71, 3)] * 60
    kept = [preference(version, 1000.0) for version in (1, 2, 3)]
    second, third = adaptations(run_of(rewards, 1), kept, {})
    assert second.level_before == pytest.approx(0.2)
    assert second.recovered_updates == 50
    assert third.level_before == pytest.approx(0.8)
    assert third.recovered_updates == 60 + 34, "0.5 is not 0.8 of 0.8; the mean of 16 x 0.5 and 34 x 0.71 is"


def test_preferences_of_an_earlier_release_and_the_first_one_are_no_switches() -> None:
    rows = run_of([(1.0, 1), (1.0, 2)], 1)
    assert adaptations(rows, [preference(1, 5.0), preference(2, 0.0)], {}) == []
    assert adaptations(rows, [], {}) == []


def test_servings_are_read_back_first_ones_first_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    assert first_served(tmp_path) == {}
    for engine, at_s in (("engine-1", 9.0), ("engine-0", 7.0), ("engine-0", 11.0)):
        note_served(tmp_path, Served(version="v00000002", engine=engine, at_s=at_s))
    with (tmp_path / "served.jsonl").open("a") as file:
        file.write('{"version": "v0')
    assert first_served(tmp_path) == {"v00000002": 7.0}


def test_preferences_are_read_from_the_audit_log_and_damaged_lines_left_out(tmp_path: Path) -> None:
    assert kept_preferences(tmp_path) == []
    document = preference(1, 3.0).document
    put = PreferenceChange(seq=1, when_s=3.0, what="put", version=1, document=document)
    lines = [put, put.model_copy(update={"seq": 2, "version": 2}), PreferenceChange(seq=3, when_s=4.0, what="hold")]
    (tmp_path / "preferences").mkdir()
    text = "\n".join([*(line.line() for line in lines), "{", '{"seq": 4'])
    (tmp_path / "preferences" / "audit.jsonl").write_text(text)
    assert [(one.version, one.stored_s) for one in kept_preferences(tmp_path)] == [(1, 3.0), (2, 3.0)]


def test_the_first_use_of_each_newer_preference_is_told_once_and_the_first_one_met_never() -> None:
    use = FirstUse(lambda: 100.0)
    met = [(3, 90.0), (3, 90.0), (4, 91.0), (4, 91.0), (3, 90.0), (5, 0.0), (6, 101.0)]
    found = [use.seconds(preference(version, stored_s)) for version, stored_s in met]
    assert found == [None, None, 9.0, None, None, None, 0.0]
