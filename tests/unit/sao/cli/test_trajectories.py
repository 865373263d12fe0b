"""`sao trajectories` on the folder of a made-up run."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sao import streams as trajectory_streams
from sao.archive import Archive
from sao.atomic import append_line
from sao.cli.main import app
from sao.config import RunConfig, dump_run_config, load_run_config
from sao.rows import read_rows
from sao.supervisor.folder import RunFolder
from tests.conftest import ROOT
from tests.support.console_run import fill_folder, written

UPDATES = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    fill_folder(root, UPDATES, switched_at=4)
    away = ["task.name=writing", f'run.dir="{root}"', 'redis.url="redis://127.0.0.1:1/0"', "redis.timeout_s=0.2"]
    RunFolder(root).run_file.write_text(dump_run_config(load_run_config(None, away, env={})))
    return root


def sao(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["trajectories", *map(str, arguments)])


def test_tail_shows_the_newest_last(folder: Path) -> None:
    result = sao("tail", folder, "-n", 5)

    assert result.exit_code == 0, result.output
    heading, *lines = result.output.splitlines()
    *_, (row, _) = read_rows(folder / "updates.jsonl")
    assert heading.split()[:3] == ["trajectory", "update", "reward"]
    assert [line.split()[1] for line in lines] == ["5", *["6"] * 4]
    last = row.trajectories[-1]
    assert lines[-1].split()[0] == last.id
    assert f"{last.reward:.3f}" in lines[-1]
    assert f"style_classical {last.components['style_classical']:.2f}" in lines[-1]


def test_tail_in_json_is_a_line_each(folder: Path) -> None:
    lines = sao("tail", folder, "-n", 1000, "--json").output.splitlines()

    assert len(lines) == 4 * UPDATES
    assert {json.loads(line)["state"] for line in lines} == {"trained"}


def test_tail_follows_until_it_is_interrupted(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    run.mkdir()
    RunFolder(run).run_file.write_text(RunFolder(folder).run_file.read_text())
    *_, (row, _) = read_rows(folder / "updates.jsonl")
    append_line(run / "updates.jsonl", row.model_dump_json().encode())
    command = [sys.executable, "-m", "sao.cli.main", "trajectories", "tail", str(run), "--follow", "--json", "-n", "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["id"] == row.trajectories[-1].id
            append_line(run / "updates.jsonl", row.model_copy(update={"update": 7}).model_dump_json().encode())
            seen = [json.loads(process.stdout.readline()) for _ in row.trajectories]
            assert [(one["id"], one["update"]) for one in seen] == [(one.id, 7) for one in row.trajectories]
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=10) == 0
        finally:
            process.kill()


def test_show_tells_text_reward_and_how_it_came_about(folder: Path) -> None:
    trained = Archive(folder / "archive").read(UPDATES).trajectories[0]
    result = sao("show", folder, trained.trajectory.id)

    assert result.exit_code == 0, result.output
    for part in (
        "turn 1, action",
        "<eos>",
        "under preference v2 classical",
        "epoch 1, on v00000005",
        "6 updates after",
    ):
        assert part in result.output, part
    assert f"reward      {trained.reward:.4f}" in result.output


def test_show_tokens_has_a_line_for_each_with_its_numbers(folder: Path) -> None:
    trained = Archive(folder / "archive").read(UPDATES).trajectories[0]
    lines = sao("show", folder, trained.trajectory.id, "--tokens").output.splitlines()

    for advantage, ratio in zip(trained.advantages, trained.ratios, strict=True):
        assert any(f"{advantage:.4f}" in line and f"{ratio:.4f}" in line for line in lines)
    assert sum(line.rstrip().endswith("stale") for line in lines) == 1
    assert sum(line.rstrip().endswith("masked") for line in lines) == 1


def test_show_in_json_is_what_the_console_gets(folder: Path) -> None:
    trained = Archive(folder / "archive").read(UPDATES).trajectories[0]
    view = json.loads(sao("show", folder, trained.trajectory.id, "--json").output)

    assert [token["advantage"] for token in view["segments"][1]["tokens"]] == list(trained.advantages)


def test_what_is_not_trained_on_yet_is_read_from_the_store(run_config: RunConfig) -> None:
    run_config.run.dir.mkdir()
    RunFolder(run_config.run.dir).run_file.write_text(dump_run_config(run_config))
    made = written(random.Random(1), "cute", 0.5)

    async def append() -> None:
        streams = trajectory_streams.connect(run_config)
        await streams.append(made.id, made.message.SerializeToString(), ordinal=0, sample=0, fields={})
        await streams.close()

    asyncio.run(append())
    result = sao("show", run_config.run.dir, made.id)
    assert result.exit_code == 0, result.output
    assert "waiting" in result.output
    nobody = sao("show", run_config.run.dir, "01a22b0f-6c7e-74f6-9ab9-7b6361bd3449")
    assert nobody.exit_code == 1
    assert "neither in" in nobody.output


def test_a_store_that_is_away_is_said(folder: Path) -> None:
    result = sao("show", folder, "01a22b0f-6c7e-74f6-9ab9-7b6361bd3449")

    assert result.exit_code == 1
    assert "was not trained on, and the run's store cannot be asked" in result.output


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for command in (["tail", tmp_path], ["show", tmp_path, "x"]):
        result = sao(*command)
        assert result.exit_code == 2
        assert "does not exist: name the folder of a run" in result.output


def test_a_run_that_has_not_trained_says_so(folder: Path, tmp_path: Path) -> None:
    RunFolder(tmp_path).run_file.write_text(RunFolder(folder).run_file.read_text())
    result = sao("tail", tmp_path)

    assert (result.exit_code, "nothing was trained on yet" in result.output) == (0, True)
    (tmp_path / "updates.jsonl").write_text('{"no":"row"}\n')
    assert sao("tail", tmp_path).exit_code == 1


def test_its_help_teaches() -> None:
    for words in (["tail", "--help"], ["show", "--help"]):
        assert "Examples:" in sao(*words).output
