"""The command line: what is refused, with which words and exit status, before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sao.cli.main import app, asked_config
from sao.config import ConfigError, dump_run_config, load_run_config
from sao.supervisor.folder import RunFolder
from sao.supervisor.up import readable, refuse_another_run, resume_command
from tests.support.update_rows import rows_of

runner = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--preset", "tiny", "--set", "trainer.learning_rate=1"], "trainer.learning_rate"),
        (["--preset", "tiny", "--seed", "-3"], "run.seed"),
        (["--preset", "huge"], "preset"),
        (["--preset", "tiny", "--engines", "0"], "engine.count"),
        ([], "preset"),
    ],
)
def test_a_wrong_setting_ends_with_2_and_its_key(arguments: list[str], key: str, tmp_path: Path) -> None:
    result = runner.invoke(app, ["up", *arguments, "--run-dir", str(tmp_path / "run")])

    assert result.exit_code == 2
    assert key in result.output
    assert not (tmp_path / "run").exists()


def test_traces_without_the_extra_end_with_2_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "sao.telemetry.traces.otlp", None)
    endpoint = ["--set", "traces.endpoint=http://collector:4317"]

    result = runner.invoke(app, ["up", "--preset", "tiny", *endpoint, "--run-dir", str(tmp_path / "run")])

    assert result.exit_code == 2
    assert "traces.endpoint" in result.output
    assert "sao[traces]" in result.output
    assert not (tmp_path / "run").exists()


def test_a_run_file_with_an_unknown_key_ends_with_2(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "tiny"\n[rollout]\nconcurency = 4\n')

    for arguments in ([str(file)], ["--preset", str(file)]):
        result = runner.invoke(app, ["up", *arguments])
        assert result.exit_code == 2
        assert "rollout.concurency" in result.output


def test_doubts_are_told_and_the_run_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sao.supervisor.up.up", lambda _config, _view: 0)
    arguments = ["up", "--preset", "tiny", "--run-dir", str(tmp_path / "run")]

    assert runner.invoke(app, arguments).stderr == ""
    result = runner.invoke(app, [*arguments, "--set", "trainer.algorithm=vapo"])

    assert result.exit_code == 0
    assert result.stderr == "warning trainer.eps_high: not used: vapo clips by [ppo]\n"


def test_options_override_the_preset(tmp_path: Path) -> None:
    config = asked_config(None, "tiny", ["run.seed=5", "run.updates=7", "trainer.trajectories_per_update=1"], tmp_path)

    assert (config.run.seed, config.run.updates, config.trainer.trajectories_per_update) == (5, 7, 1)
    assert config.redis.embedded


def test_a_run_folder_alone_asks_for_what_that_run_was_asked_for(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = load_run_config(None, ["run.seed=5", f'run.dir="{tmp_path}"'], env={}, preset="tiny")
    folder.asked_file.write_text(dump_run_config(first))

    again = asked_config(None, None, ["run.updates=500"], tmp_path)

    assert again == first.model_copy(update={"run": first.run.model_copy(update={"updates": 500})})
    refuse_another_run(again, folder)


@pytest.mark.parametrize(
    ("change", "key"),
    [("run.seed=6", "run.seed"), ("task.name=writing", "task.name"), ("model.hidden_size=96", "model")],
)
def test_a_folder_is_not_resumed_as_another_run(tmp_path: Path, change: str, key: str) -> None:
    folder = RunFolder(tmp_path)
    folder.asked_file.write_text(dump_run_config(load_run_config(None, ["run.seed=5"], env={})))

    with pytest.raises(ConfigError, match="name another --run-dir") as caught:
        refuse_another_run(load_run_config(None, ["run.seed=5", change], env={}), folder)

    assert caught.value.key == key


def test_the_resume_command_survives_a_shell() -> None:
    assert resume_command(Path("/runs/my run")) == "sao up --run-dir '/runs/my run'"


def test_a_task_or_a_checkpoint_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    """And the folder does not hold a run afterwards: the next try may name another."""
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    given = ["--set", f"engine.environment={python.parent.parent}", "--run-dir", str(tmp_path / "run")]
    for key, value in (("task.name", "nope"), ("model.path", "/nowhere"), ("task.prompts", "/nowhere.jsonl")):
        result = runner.invoke(app, ["up", "--preset", "tiny", *given, "--set", f"{key}={value}"])
        assert (result.exit_code, f"configuration error: {key}: " in result.output) == (2, True), result.output
    assert not RunFolder(tmp_path / "run").holds_a_run


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = runner.invoke(app, ["up", "--preset", "tiny", "--run-dir", str(tmp_path / "file")])
    assert result.exit_code == 1
    assert f"failed: {tmp_path / 'file'}: File exists" in result.output


def test_the_resume_command_names_the_program_as_it_was_called_where_path_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", [".venv/bin/sao"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert resume_command(Path("/runs/one")) == ".venv/bin/sao up --run-dir /runs/one"


def test_a_traceback_in_a_log_line_is_shown_as_lines() -> None:
    assert readable('{"event": "failed", "time": "t", "exception": "Traceback:\\n  File 1\\nValueError: x"}') == [
        "t failed:",
        "Traceback:",
        "  File 1",
        "ValueError: x",
    ]
    for line in ("plain", '{"event": "started"}', "[1]"):
        assert readable(line) == [line]


def test_status_and_report_say_when_there_is_nothing(tmp_path: Path) -> None:
    for command in ("status", "report"):
        result = runner.invoke(app, [command, str(tmp_path)])
        assert result.exit_code == 1
        assert "no run" in result.output
        missing = runner.invoke(app, [command, str(tmp_path / "run.toml")])
        assert missing.exit_code == 2
        assert "run.toml does not exist: name the folder of a run, or a run file" in missing.output


def test_status_and_report_of_a_run_that_has_ended(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.run_file.write_text(dump_run_config(load_run_config(None, ["run.seed=4"], env={})))
    *rows, last = rows_of([0.25] * 120)
    rows.append(last.model_copy(update={"held": ["mismatch_kl 0.5 nats, limit 0.1"]}))
    folder.rows_file.write_text("".join(row.model_dump_json() + "\n" for row in rows))

    status = runner.invoke(app, ["status", str(tmp_path)])
    assert status.exit_code == 1
    assert "not running" in status.output
    assert "0.250" in status.output
    assert "PUBLISHING HELD" in status.output
    folder.note("up", detail="new")
    assert "not running\n" in runner.invoke(app, ["status", str(tmp_path)]).output
    folder.note("stopped", detail="stopped by SIGINT")
    assert "not running, stopped by SIGINT\n" in runner.invoke(app, ["status", str(tmp_path)]).output

    report = runner.invoke(app, ["report", str(tmp_path)])
    assert report.exit_code == 0
    assert "120 trajectories" in report.output
    assert "publishing held       mismatch_kl 0.5 nats, limit 0.1" in report.output
    assert folder.report_file.exists()
    assert folder.curves_file.exists()


def test_help_teaches_the_first_command() -> None:
    assert "sao up --preset tiny" in runner.invoke(app, ["--help"]).output
    up = runner.invoke(app, ["up", "--help"]).output
    assert "Ctrl-C" in up
    assert "resumes" in up
