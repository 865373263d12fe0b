"""When set-up does something and when it does not, with pip replaced by a recorder."""

from __future__ import annotations

import json
import venv
from pathlib import Path

import pytest

from tools import setup
from tools.setup import Environment, StepFailedError, build, install_torch, shown


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment that is not built yet."""
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    lock = tmp_path / "some.lock"
    lock.write_text("# pins\ndeepspeed==0.19.8\nsmall==1\ntorch==2.13.0+cpu\n")
    return Environment("project", tmp_path / "env", lock, (), lambda _env: None)


@pytest.fixture
def calls(env: Environment, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What was run, in order; torch says it has no CUDA."""
    seen: list[list[str]] = []

    def record(_env: Environment, argv: list[str]) -> str:
        arguments = [Path(part).read_text() if part.endswith(".txt") else part for part in argv[1:]]
        seen.append(arguments)
        return "None\n"

    monkeypatch.setattr(setup, "run", record)
    monkeypatch.setattr(venv, "create", lambda folder, **_options: Path(folder).mkdir(exist_ok=True))
    return seen


def test_torch_comes_first_by_name_then_the_locked_rest_then_what_is_built(
    env: Environment, calls: list[list[str]]
) -> None:
    build(env)

    assert calls[0][-1] == "torch==2.13.0+cpu"
    assert calls[1][-1] == "small==1"
    assert calls[2][-1] == "deepspeed==0.19.8"
    assert "--no-build-isolation" in calls[2]
    assert all("--no-deps" in call for call in calls[:3])
    assert env.is_right()


def test_an_environment_as_the_lock_says_is_left_alone_and_another_lock_is_not(
    env: Environment, calls: list[list[str]]
) -> None:
    assert not env.is_right()
    build(env)
    assert env.is_right()

    env.lock.write_text(env.lock.read_text() + "more==2\n")

    assert not env.is_right()


def test_a_moved_environment_is_built_anew(
    env: Environment, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared = []

    def create(folder: Path, *, clear: bool, **_options: bool) -> None:
        folder.mkdir(exist_ok=True)
        cleared.append(clear)

    monkeypatch.setattr(venv, "create", create)
    build(env)
    stamp = json.loads(env.stamp.read_text())
    env.stamp.write_text(json.dumps(stamp | {"folder": "/elsewhere"}))

    build(env)

    assert cleared == [False, True]


def test_a_half_built_environment_has_no_stamp(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_env: Environment, _argv: list[str]) -> str:
        msg = "no network"
        raise StepFailedError(msg)

    monkeypatch.setattr(venv, "create", lambda folder, **_options: Path(folder).mkdir(exist_ok=True))
    monkeypatch.setattr(setup, "run", fail)

    with pytest.raises(StepFailedError):
        build(env)

    assert not env.is_right()


def test_a_torch_with_cuda_is_refused(
    env: Environment, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "run", lambda *_: "12.8\n")

    with pytest.raises(StepFailedError, match=r"CUDA 12\.8"):
        build(env)

    assert not env.is_right()


def test_where_pip_has_no_cpu_build_another_index_is_asked(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def only_there(_env: Environment, argv: list[str]) -> str:
        asked.append(argv)
        if "--index-url" not in argv:
            msg = "no matching distribution"
            raise StepFailedError(msg)
        return ""

    monkeypatch.setattr(setup, "run", only_there)
    monkeypatch.setenv("SAO_TORCH_INDEX", "https://mirror.example/cpu")

    install_torch(env, "torch==2.13.0+cpu")

    assert asked[-1][-3:] == ["--index-url", "https://mirror.example/cpu", "torch==2.13.0+cpu"]


def test_a_command_that_fails_shows_its_last_words_and_its_log(env: Environment) -> None:
    env.log.parent.mkdir()
    env.step = "installing packages"

    with pytest.raises(StepFailedError, match="installing packages failed") as caught:
        setup.run(env, ["/bin/sh", "-c", "echo Collecting small; echo what went wrong; exit 3"])

    assert "what went wrong" in str(caught.value)
    assert env.packages == 1
    assert "Collecting small" in env.log.read_text()


def test_progress_counts_packages_of_the_lock(env: Environment) -> None:
    env.step, env.packages = "installing packages", 1

    assert "[########................] 1/3" in shown(env, env.started)
