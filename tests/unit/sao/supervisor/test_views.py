"""What a person at the terminal is shown."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sao.config import load_run_config
from sao.preference import Preference, PreferenceDocument
from sao.supervisor.plot import plot, resampled
from sao.supervisor.progress import Progress
from sao.supervisor.status import Line, Status, console_url, other_preference, summary, switch_command
from sao.supervisor.views import LiveView, PlainLines
from sao.tasks import load_task
from tests.support.update_rows import rows_of, trained_row, update_row

values = st.lists(st.floats(-1, 2), max_size=300)


@given(values, st.integers(1, 80), st.integers(1, 9))
def test_a_plot_has_its_size_and_higher_values_have_taller_columns(data: list[float], width: int, height: int) -> None:
    rows = plot(data, width, height, 0.0, 1.0)

    assert len(rows) == height
    assert {len(row) for row in rows} == {min(len(data), width)}
    heights = [sum(" ▁▂▃▄▅▆▇█".index(row[i]) for row in rows) for i in range(len(rows[0]))]
    shown = resampled(data, width)
    for i in range(len(shown) - 1):
        assert shown[i] > shown[i + 1] or heights[i] <= heights[i + 1]


@given(values, st.integers(1, 80))
def test_resampling_keeps_the_range(data: list[float], width: int) -> None:
    assert all(min(data) - 1e-9 <= value <= max(data) + 1e-9 for value in resampled(data, width))


def test_progress_follows_the_file_as_it_grows(tmp_path: Path) -> None:
    file = tmp_path / "updates.jsonl"
    progress = Progress(file)
    assert progress.poll() == []
    rows = rows_of([0.0] * 100 + [1.0] * 50, per_update=10)
    lines = [row.model_dump_json() + "\n" for row in rows]

    file.write_text("".join(lines[:10]) + lines[10][:20])
    progress.poll()
    assert (progress.trajectories, progress.update, progress.average) == (100, 10, 0.0)

    file.write_text("".join(lines))
    progress.poll()
    assert (progress.trajectories, progress.version, progress.average) == (150, "v00000015", 0.5)
    assert progress.tokens_per_s == pytest.approx(20.0)  # one trajectory of 20 tokens a second
    assert progress.trajectories_per_s == pytest.approx(1.0)


def test_the_summary_shows_a_dash_for_what_is_not_known_yet(tmp_path: Path) -> None:
    shown = dict(summary(Progress(tmp_path / "none")))

    assert shown["reward, last 100"] == shown["explained variance"] == shown["rejected"] == "-"


def test_the_summary_names_the_figures_of_the_issue(tmp_path: Path) -> None:
    file = tmp_path / "updates.jsonl"
    metrics = {"dis_accepted_fraction": 0.96, "explained_variance": 0.25, "entropy": 1.5}
    file.write_text(update_row(7, [trained_row(1, 0.5, lag=2)], metrics=metrics).model_dump_json() + "\n")
    progress = Progress(file)
    progress.poll()

    shown = dict(summary(progress))

    assert shown["update"] == "7"
    assert shown["rejected"] == "4.0 %"
    assert shown["explained variance"] == "0.25"
    assert shown["lag"] == "2.0"
    assert shown["version"] == "v00000007"


def test_the_switch_command_is_one_that_a_shell_and_the_service_understand() -> None:
    config = load_run_config(None, ["reward.port=8123", "task.name=writing"], env={})

    words = shlex.split(switch_command(config, None))

    assert words[:4] == ["curl", "-X", "PUT", "http://127.0.0.1:8123/v1/preferences"]
    document = PreferenceDocument.model_validate_json(words[-1])
    assert document.name != load_task("writing").default_preference.name


def test_the_next_thing_to_try_is_always_another_one_than_the_present() -> None:
    config = load_run_config(None, ["task.name=writing"], env={})
    task = load_task("writing")
    present = Preference(version=1, document=task.default_preference)
    tried = set()
    for version in range(2, 5):
        tried.add(present.document.name)
        present = Preference(version=version, document=other_preference(config, present))

    assert len(tried) == 3


def test_with_a_token_the_command_takes_it_from_the_environment() -> None:
    config = load_run_config(None, ["auth.token=open-sesame"], env={})

    command = switch_command(config, None)

    assert "open-sesame" not in command
    assert "$SAO__AUTH__TOKEN" in command


def explained(tmp_path: Path, **fields: Any) -> Status:
    """A run whose last row explains itself."""
    file = tmp_path / "explained.jsonl"
    rows = [update_row(6, [trained_row(1, 0.5)]), update_row(7, [trained_row(2, 0.5)])]
    rows[-1] = rows[-1].model_copy(update={"version": "", **fields})
    file.write_text("".join(row.model_dump_json() + "\n" for row in rows))
    progress = Progress(file)
    progress.poll()
    return Status(1.0, [], progress, None, None)


def shown_by_all(status: Status, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the live view and plain lines show of it, on one line each."""
    console = Console(force_terminal=True, width=200, height=50, record=True)
    view = LiveView(console)
    view.show(status, "curl")
    view.close()
    capsys.readouterr()
    PlainLines().show(status, "curl")
    return [console.export_text(), capsys.readouterr().out]


def test_a_critic_that_trains_alone_is_no_idle_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    phase = "critic pre-training 40/64, explained variance 0.12 of 0.2"
    for text in shown_by_all(explained(tmp_path, critic_only=True, phase=phase), capsys):
        assert f"{phase}; the policy waits for it" in text


def test_held_publishing_is_shown_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "rejected_share 0.41 of the fresh action tokens, limit 0.3"
    for text in shown_by_all(explained(tmp_path, held=[reason]), capsys):
        assert f"PUBLISHING HELD, engines stay on v00000006: {reason}" in text
    (tmp_path / "explained.jsonl").unlink()
    for text in shown_by_all(explained(tmp_path), capsys):
        assert "HELD" not in text


@pytest.fixture
def status(tmp_path: Path) -> Status:
    file = tmp_path / "updates.jsonl"
    file.write_text("".join(row.model_dump_json() + "\n" for row in rows_of([0.2, 0.9] * 40)))
    progress = Progress(file)
    progress.poll()
    lines = [
        Line("engine-0", "ready", "http://127.0.0.1:24000", "serving v00000020"),
        Line("trainer", "restarting", "http://127.0.0.1:24001", "started 2 times"),
    ]
    console = console_url(load_run_config(None, ["reward.bind=0.0.0.0", "reward.port=8123"], env={}))
    return Status(12.0, lines, progress, None, None, console=console)


def test_the_live_view_shows_curve_figures_processes_events_and_the_command(status: Status) -> None:
    console = Console(force_terminal=True, width=120, height=50, record=True)
    view = LiveView(console)
    view.tell("trainer", "killed by SIGKILL; starting it again (1 of 3)")

    view.show(status, "curl -X PUT http://127.0.0.1:1/v1/preferences")
    view.close()

    text = console.export_text()
    for part in ("█", "v00000020", "http://127.0.0.1:24000", "serving", "starting it again", "curl -X PUT", "Ctrl-C"):
        assert part in text
    assert "http://127.0.0.1:8123/console" in text


def test_lines_about_the_store_are_shown_by_both_views(
    status: Status, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = "STORE FULL, 100% of its memory"
    for progress in (status.progress, Progress(tmp_path / "none")):
        full = Status(1.0, status.lines, progress, None, None, [line])
        console = Console(force_terminal=True, width=120, height=50, record=True)
        view = LiveView(console)
        view.show(full, "curl")
        view.close()
        PlainLines().show(full, "curl")
        assert line in console.export_text()
        assert line in capsys.readouterr().out


@pytest.mark.parametrize("storage", [[], ["STORE FULL, 100% of its memory" + " and more of it" * 25, "2 dead letters"]])
def test_the_command_is_seen_on_a_small_terminal_too(status: Status, storage: list[str]) -> None:
    """Of a view higher than the terminal, the end is cut off while it is live."""
    console = Console(force_terminal=True, width=80, height=24)
    view = LiveView(console)
    for number in range(6):
        view.tell("trainer", f"event {number}")
    lines = [*status.lines, *(Line(f"service-{number}", "ready", "http://127.0.0.1:1", "") for number in range(5))]
    command = switch_command(load_run_config(None, env={}, preset="tiny"), None)

    with console.capture() as capture:
        view.show(Status(12.0, lines, status.progress, (350, 700, 0.8), None, storage), command)
    live = capture.get()
    view.close()

    for part in ("curl -X PUT", "Ctrl-C", "trainer restarting", "6 of 7", *(line[:14] for line in storage)):
        assert part in live


def test_the_live_view_shows_the_warm_start(tmp_path: Path) -> None:
    console = Console(force_terminal=True, width=100, height=50, record=True)
    view = LiveView(console)

    view.show(Status(3.0, [], Progress(tmp_path / "none"), (350, 700, 0.8), None), "curl")
    view.close()

    assert "350 of 700" in console.export_text()


def test_plain_lines_say_what_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [Line("engine-0", "starting", "", ""), Line("valkey", "ready", "", "")]

    PlainLines().show(Status(1.0, lines, Progress(tmp_path / "none"), None, None), "curl")
    ready = [Line("engine-0", "ready", "", "quarantined v00000001 log-probs differ")]
    PlainLines().show(Status(1.0, ready, Progress(tmp_path / "none"), None, None), "curl")

    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("waiting for engine-0 starting")
    assert "quarantined v00000001 log-probs differ" in second


def test_plain_lines_hold_no_control_codes_and_come_every_few_seconds(
    status: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    view = PlainLines()

    for _ in range(5):
        view.show(status, "curl -X PUT")
    view.tell("engine-0", "ready after 30 s")

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4  # the console and the command once, the figures once, the event
    assert lines[0].endswith(": http://127.0.0.1:8123/console")
    assert "curl -X PUT" in lines[1]
    assert "update 20" in lines[2]
    assert lines[3].endswith("engine-0: ready after 30 s")
    assert "\x1b" not in "".join(lines)


def test_the_document_of_the_command_is_small_json() -> None:
    config = load_run_config(None, [], env={})

    body = json.loads(shlex.split(switch_command(config, None))[-1])

    assert set(body) <= {"name", "weights", "gates", "thresholds", "offset", "low", "high"}
