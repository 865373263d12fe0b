"""`sao replay` hands over to the trainer's program: its arguments, its environment, its output, its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sao.cli.main import app
from tests.conftest import ROOT


class _ReplacedError(Exception):
    """The process would be another program now."""


@pytest.mark.parametrize(
    ("given", "handed_over"),
    [
        (["runs/mine", "3", "7"], ["runs/mine", "3", "7", "--random", "0", "--seed", "0", "--tolerance", "0.0001"]),
        (
            ["--random", "20", "--seed", "4", "--tolerance", "1e-3", "--json", "runs/mine"],
            ["runs/mine", "--random", "20", "--seed", "4", "--tolerance", "0.001", "--json"],
        ),
    ],
)
def test_the_arguments_are_handed_over(
    monkeypatch: pytest.MonkeyPatch, given: list[str], handed_over: list[str]
) -> None:
    calls: list[tuple[str, Sequence[str], Mapping[str, str]]] = []

    def execve(path: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        calls.append((path, argv, env))
        raise _ReplacedError

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setenv("SAO__TRAINER__EPS_LOW", "0.5")
    result = CliRunner().invoke(app, ["replay", *given])

    assert isinstance(result.exception, _ReplacedError)
    ((path, argv, env),) = calls
    assert path == sys.executable
    assert argv == [sys.executable, "-m", "services.trainer.replay", *handed_over]
    assert env["OMP_NUM_THREADS"] == "1"
    assert "SAO__TRAINER__EPS_LOW" not in env, "the run's own settings count, not those of this shell"


def test_a_run_file_stands_for_the_folder_that_it_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[run]\ndir = "/data/run"\n')
    calls: list[Sequence[str]] = []
    monkeypatch.setattr(os, "execve", lambda _path, argv, _env: calls.append(argv))
    CliRunner().invoke(app, ["replay", str(file), "3"])
    assert [argv[3:5] for argv in calls] == [["/data/run", "3"]]


@pytest.mark.parametrize("given", [["replay"], ["replay", "runs/mine", "seven"], ["replay", "runs/mine", "--often"]])
def test_wrong_arguments_end_with_2(given: list[str]) -> None:
    assert CliRunner().invoke(app, given).exit_code == 2


def test_output_and_exit_status_are_the_programs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sao.cli.main", "replay", str(tmp_path), "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "cannot replay" in done.stderr
    assert "holds no run" in done.stderr
