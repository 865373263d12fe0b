"""What a pod can say of its run: it has the run file and the environment, and no supervisor's folder."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import sao.board
from sao.board.base import TrainerFacts, TrainerState
from sao.cli.main import app
from sao.config import RunConfig, dump_run_config
from tests.support.console_run import fill_folder
from tests.support.valkey import valkey


def sao_(*arguments: object, **env: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", **env}).invoke(app, [*map(str, arguments)])


@pytest.fixture
def run_file(run_config: RunConfig, tmp_path: Path) -> Path:
    """Somewhere else than the run's folder, as a ConfigMap is; the folder itself is filled by services alone."""
    run_config.run.dir.mkdir()
    fill_folder(run_config.run.dir, 6, switched_at=4)
    made = tmp_path / "etc" / "run.toml"
    made.parent.mkdir()
    made.write_text(dump_run_config(run_config))
    return made


def begin(config: RunConfig) -> None:
    async def write() -> None:
        board = sao.board.connect(config)
        epoch = await board.new_trainer_epoch()
        facts = TrainerFacts(epoch=epoch, update=6, version="v00000006", consumed=24, state=next(iter(TrainerState)))
        await board.write_trainer(facts)
        await board.close()

    asyncio.run(write())


def test_status_by_run_file_says_what_folder_and_store_know(run_config: RunConfig, run_file: Path) -> None:
    assert "no trainer has begun" in sao_("status", run_file).output
    begin(run_config)
    told = sao_("status", run_file)
    assert told.exit_code == 0, told.output
    assert f"the trainer is {next(iter(TrainerState)).value}, start " in told.output
    assert re.search(r"^ +update +6$", told.output, re.MULTILINE)
    assert re.search(r"^ +last update +\d+ s ago$", told.output, re.MULTILINE)
    assert "/console" in told.output


def test_a_store_that_does_not_answer_is_said_and_ends_with_1(run_file: Path) -> None:
    told = sao_("status", run_file, SAO__REDIS__URL="redis://127.0.0.1:1/0")
    assert told.exit_code == 1
    assert "the store does not answer" in told.output
    assert "STORE DOES NOT ANSWER at redis://127.0.0.1:1/0" in told.output


def test_the_stores_password_comes_from_the_environment(run_file: Path, tmp_path: Path) -> None:
    with valkey(tmp_path, "--requirepass", "hush", password="hush") as url:
        assert sao_("status", run_file, SAO__REDIS__URL=url).exit_code == 1
        told = sao_("status", run_file, SAO__REDIS__URL=url.replace("//", "//:hush@"))
        assert told.exit_code == 0, told.output
        assert "hush" not in told.output


def test_commands_that_read_a_run_take_its_run_file(run_config: RunConfig, run_file: Path) -> None:
    listed = sao_("trajectories", "tail", run_file, "-n", 1)
    assert listed.exit_code == 0, listed.output
    trajectory_id = listed.output.splitlines()[-1].split()[0]
    assert trajectory_id in sao_("trajectories", "show", run_file, trajectory_id).output
    assert "no dead letters" in sao_("dead", "list", run_file).output
    assert sao_("report", run_file).exit_code == 0
    assert (run_config.run.dir / "report.json").exists()


@pytest.mark.parametrize("command", [["status"], ["trajectories", "tail"], ["dead", "list"], ["report"]])
def test_a_wrong_run_file_ends_with_2_and_its_key(tmp_path: Path, command: list[str]) -> None:
    wrong = tmp_path / "run.toml"
    wrong.write_text("[rollout]\nconcurency = 4\n")
    told = sao_(*command, wrong)
    assert (told.exit_code, "rollout.concurency" in told.output) == (2, True)
