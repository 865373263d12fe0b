"""Real processes: what the operating system sees of a service."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process whose `main` has the given body, with the given run file."""
    started: list[subprocess.Popen[str]] = []

    def start(body: str, run_file: str = '[run]\nname = "proc"\n', *arguments: str) -> subprocess.Popen[str]:
        script, config = tmp_path / "service.py", tmp_path / "run.toml"
        config.write_text(run_file)
        head = "import asyncio\nfrom sao.config import ConfigError\nfrom sao.process import run_service\n"
        main = "async def main(config, stop):\n" + textwrap.indent(textwrap.dedent(body), "    ")
        script.write_text(f"{head}\n{main}\nrun_service('thing', main)\n")
        command = [sys.executable, str(script), *(arguments or ("--config", str(config)))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=30)
    return process.returncode, stderr


def events(stderr: str) -> list[str]:
    return [json.loads(line)["event"] for line in stderr.splitlines()]


WAIT = """
    print("up", flush=True)
    await stop.wait()
    print("orderly", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_event_and_the_process_ends_with_0(start: Start, number: signal.Signals) -> None:
    process = start(WAIT)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 0
    assert stdout == "orderly\n"
    assert events(stderr) == ["started", "stopping", "ended"]


def test_a_second_signal_does_not_wait_for_the_orderly_stop(start: Start) -> None:
    process = start(
        """
        print("up", flush=True)
        await stop.wait()
        print("putting things in order", flush=True)
        await asyncio.Event().wait()
        """
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.terminate()
    assert process.stdout.readline() == "putting things in order\n"
    process.terminate()
    code, stderr = finished(process)
    assert code == 1
    assert events(stderr)[-1] == "stopped in the middle of work"


def test_the_tasks_of_the_loop_are_counted_while_they_last(start: Start) -> None:
    process = start(
        """
        from prometheus_client import REGISTRY
        count = lambda: int(REGISTRY.get_sample_value("sao_process_tasks"))
        before = count()
        tasks = [asyncio.create_task(stop.wait()) for _ in range(3)]
        during = count()
        stop.set()
        await asyncio.wait(tasks)
        print(during - before, count() - before, await asyncio.to_thread(count) - before, flush=True)
        """
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "3 0 0\n"
    assert finished(process)[0] == 0


def test_work_that_is_over_ends_with_0(start: Start) -> None:
    code, stderr = finished(start("assert config.run.name == 'proc'"))
    assert code == 0
    assert json.loads(stderr.splitlines()[0]) | {"time": ""} == {
        "event": "started",
        "level": "info",
        "logger": "sao.process",
        "run": "proc",
        "service": "thing",
        "time": "",
    }


def test_an_escaped_exception_is_logged_with_its_traceback_and_ends_with_1(start: Start) -> None:
    code, stderr = finished(start("raise RuntimeError('disk is gone')"))
    assert code == 1
    last = json.loads(stderr.splitlines()[-1])
    assert last["event"] == "service failed"
    assert last["exception"].endswith("RuntimeError: disk is gone")
    assert "service.py" in last["exception"]


def test_a_wrong_setting_ends_with_2_and_its_key_before_main_runs(start: Start) -> None:
    code, stderr = finished(start("raise AssertionError", "[trainer]\nlr = -1.0\n"))
    assert code == 2
    assert "trainer.lr" in stderr
    assert "Traceback" not in stderr


def test_a_wrong_setting_that_main_finds_ends_with_2(start: Start) -> None:
    code, stderr = finished(start("raise ConfigError('task.name', 'no such task')"))
    assert code == 2
    assert "task.name: no such task" in stderr


def test_a_missing_run_file_ends_with_2_and_its_path(start: Start, tmp_path: Path) -> None:
    code, stderr = finished(start("pass", "", "--config", str(tmp_path / "absent.toml")))
    assert code == 2
    assert "absent.toml" in stderr


def test_without_config_the_usage_is_shown(start: Start) -> None:
    code, stderr = finished(start("pass", "", "--confi", "x"))
    assert code == 2
    assert "--config RUN.toml" in stderr
