"""report.json and curves.png from a run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sao.adaptation import Served, note_served
from sao.config import dump_run_config, load_run_config
from sao.preference import PreferenceDocument
from sao.preference_changes import PreferenceChange
from sao.report import adaptation_lines, make_report, wall_times, write_report
from sao.rows import UpdateRow
from sao.supervisor.folder import RunFolder, TimelineEvent
from tests.support.update_rows import rows_of, trained_row, update_row


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run folder with its settings and no rows yet."""
    result = RunFolder(tmp_path)
    result.run_file.write_text(dump_run_config(load_run_config(None, ["run.seed=3", "run.name=test"], env={})))
    return result


def write_rows(folder: RunFolder, rows: list[UpdateRow]) -> None:
    folder.rows_file.write_text("".join(row.model_dump_json() + "\n" for row in rows))


def test_nothing_trained_on_is_no_report(folder: RunFolder) -> None:
    assert write_report(folder.root) is None
    assert not folder.report_file.exists()


def test_the_report_has_the_promised_fields(folder: RunFolder) -> None:
    write_rows(folder, rows_of([0.0] * 100 + [1.0] * 100))

    assert write_report(folder.root) is not None

    report = json.loads(folder.report_file.read_text())
    assert set(report["reward_curve"][0]) == {"trajectory", "update", "wall_s", "reward", "moving_average"}
    assert report["reward_curve"][0]["trajectory"] == 100
    assert report["reward_curve"][0]["moving_average"] == 0.0
    assert report["reward_curve"][-1]["moving_average"] == 1.0
    assert (report["trajectories"], report["updates"], report["seed"]) == (200, 50, 3)
    assert report["versions"][-1] == "v00000050"
    assert report["lag"] == {"mean": 0.0, "max": 0, "histogram": {"0": 200}}
    assert report["config"]["run"]["name"] == "test"
    assert report["throughput"]["trajectories_per_s"] == pytest.approx(200 / 199.5)
    assert folder.curves_file.read_bytes().startswith(b"\x89PNG")


def test_each_switch_is_told_with_its_four_times(folder: RunFolder) -> None:
    rows = [trained_row(n, 0.5, scored_under=1 + (n > 60)) for n in range(1, 181)]
    write_rows(folder, [update_row(n, [row]) for n, row in enumerate(rows, start=1)])
    kept = folder.root / "preferences"
    kept.mkdir()
    changes = [
        PreferenceChange(
            seq=version,
            when_s=1058.0,
            what="put",
            version=version,
            document=PreferenceDocument(name=name, weights={"a": 1.0}),
        )
        for version, name in ((1, "cute"), (2, "classical"), (3, "nobody's"))
    ]
    (kept / "audit.jsonl").write_text("".join(f"{change.line()}\n" for change in changes))
    note_served(folder.root, Served(version="v00000062", engine="engine-0", at_s=1064.5))

    report = write_report(folder.root)

    assert report is not None
    second, third = adaptation_lines(report)
    assert second.startswith("switch 2, classical: scored after 2.0 s, trained after 3.5 s, serving after 6.5 s, ")
    assert second.endswith("reward back after 52.5 s (50 updates)")
    assert third == "switch 3, nobody's: scored never, trained never, serving never, reward back never"
    assert [one["version"] for one in json.loads(folder.report_file.read_text())["preference"]["adaptation"]] == [2, 3]


def test_a_line_that_is_still_being_written_does_not_count(folder: RunFolder) -> None:
    write_rows(folder, rows_of([1.0] * 8))
    with folder.rows_file.open("a") as file:
        file.write('{"update": 3, "crit')

    made = make_report(folder.root)

    assert made is not None
    assert made[0].trajectories == 8


def test_secrets_do_not_reach_the_report(folder: RunFolder) -> None:
    config = load_run_config(None, ["auth.token=open-sesame", "redis.url=redis://:hunter2@127.0.0.1:1/0"], env={})
    folder.run_file.write_text(dump_run_config(config))
    write_rows(folder, rows_of([1.0]))

    write_report(folder.root)

    text = folder.report_file.read_text()
    assert "open-sesame" not in text
    assert "hunter2" not in text


def event(at_s: float, what: str, process: str = "") -> TimelineEvent:
    return TimelineEvent(at_s=at_s, event=what, process=process)


def test_wall_times_are_those_of_the_newest_start() -> None:
    timeline = [
        event(10.0, "up"),
        event(11.0, "started", "engine-0"),
        event(100.0, "up"),
        event(101.0, "started", "engine-0"),
        event(101.0, "started", "engine-1"),
        event(131.0, "ready", "engine-0"),
        event(141.0, "ready", "engine-1"),
        event(142.0, "ready"),
        event(400.0, "stopped"),
    ]
    before = update_row(1, [trained_row(1, 0.0, consumed_s=50.0)])
    after = update_row(2, [trained_row(2, 0.0, consumed_s=150.0)])

    wall = wall_times(timeline, [before, after])

    assert wall.engine_start_s == 40.0
    assert wall.all_ready_s == 42.0
    assert wall.first_trajectory_s == 50.0
    assert wall.first_update_s == 50.5
    assert wall.total_s == 300.0
    assert wall.training_s == 100.5
    assert wall.warm_start_s is None
