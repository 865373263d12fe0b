"""However a run ends, no process of it stays: the promise of `sao up`, kept over real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sao.supervisor.folder import RunFolder

DEADLINE_S = 30.0


@dataclass(frozen=True)
class Run:
    """A stand-in run in a process of its own."""

    process: subprocess.Popen[str]
    folder: RunFolder
    mark: str

    def processes(self) -> list[int]:
        """Live processes of the run but the supervisor: stand-ins by their mark, Valkey by where it works."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                marked = self.mark.encode() in (entry / "cmdline").read_bytes()
                inside = (entry / "cwd").readlink() == self.folder.root / "valkey"
                if (marked or inside) and int(entry.name) != self.process.pid:
                    found.append(int(entry.name))
        return found

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Until the condition holds; fails with what the run said."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > end:
                self.process.kill()
                pytest.fail(f"{what} did not happen; the run said:\n{self.process.communicate()[0]}")
            time.sleep(0.02)

    def ready(self) -> bool:
        """Whether every process is ready."""
        return any(event.event == "ready" and not event.process for event in self.folder.timeline())

    def output(self) -> str:
        """All it said, once it has ended."""
        return self.process.communicate(timeout=DEADLINE_S)[0]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    runs: list[Run] = []

    def starter(behaviour: str) -> Run:
        mark = uuid.uuid4().hex
        folder = tmp_path / mark
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.sao.supervisor.standin", str(folder), mark, behaviour],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        runs.append(Run(process, RunFolder(folder), mark))
        return runs[-1]

    yield starter
    for run in runs:
        run.process.kill()
        run.process.communicate()
        for pid in run.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_every_process_within_five_seconds_and_says_how_to_resume(
    start: Callable[[str], Run], number: signal.Signals
) -> None:
    run = start("stubborn")
    run.wait_for(run.ready, "readiness")
    assert len(run.processes()) == 4  # Valkey, engine, its grandchild, worker

    run.process.send_signal(number)
    sent = time.monotonic()
    run.wait_for(lambda: not run.processes(), "the end of every process")

    assert time.monotonic() - sent < 5.0
    assert run.process.wait(DEADLINE_S) == 128 + number
    assert f"sao up --run-dir {run.folder.root}" in run.output()


def test_a_killed_supervisor_leaves_no_child_and_no_grandchild(start: Callable[[str], Run]) -> None:
    run = start("stubborn")
    run.wait_for(run.ready, "readiness")

    run.process.kill()

    run.wait_for(lambda: not run.processes(), "the end of every process")


def test_a_supervisor_killed_together_with_its_guard_still_leaves_no_direct_child(start: Callable[[str], Run]) -> None:
    run = start("training")
    run.wait_for(run.ready, "readiness")
    direct = [one.pid for one in run.folder.processes() if one.pid is not None]
    guard = next(
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
        and b"sao.supervisor.guard" in (entry / "cmdline").read_bytes()
        and f"PPid:\t{run.process.pid}\n" in (entry / "status").read_text()
    )

    os.kill(run.process.pid, signal.SIGSTOP)  # it cannot start another guard between the two
    os.kill(guard, signal.SIGKILL)
    os.kill(run.process.pid, signal.SIGKILL)

    run.wait_for(lambda: not set(direct) & set(run.processes()), "the end of every direct child")


def test_a_failed_start_ends_everything_and_shows_why(start: Callable[[str], Run]) -> None:
    run = start("failing")

    output = run.output()

    assert run.process.returncode == 1
    assert "no licence to serve" in output
    assert "worker.log" in output
    assert run.processes() == []


def test_a_wrong_setting_in_a_child_is_not_tried_again(start: Callable[[str], Run]) -> None:
    run = start("wrong-setting")

    output = run.output()

    assert run.process.returncode == 1
    assert "rollout.concurrency: wrong" in output
    assert not [event for event in run.folder.timeline() if event.event == "restarted"]
    assert run.processes() == []


def test_a_child_that_keeps_crashing_is_started_again_three_times(start: Callable[[str], Run]) -> None:
    run = start("crashing-always")

    output = run.output()

    assert run.process.returncode == 1
    restarts = [event.process for event in run.folder.timeline() if event.event == "restarted"]
    assert restarts == ["worker"] * 3
    assert "exit code 9; starting it again (3 of 3)" in output
    assert "crashed 4 times" in output
    assert run.processes() == []


def test_a_killed_child_is_started_again_and_the_run_ends_with_the_trainer(start: Callable[[str], Run]) -> None:
    run = start("training")
    run.wait_for(run.ready, "readiness")
    engine = next(one for one in run.folder.processes() if one.name == "engine-0")
    assert engine.pid is not None

    os.kill(engine.pid, signal.SIGKILL)
    run.wait_for(
        lambda: any(one.name == "engine-0" and one.starts == 2 for one in run.folder.processes()), "a second engine"
    )
    (run.folder.root / "finish").touch()

    output = run.output()
    assert run.process.returncode == 0
    assert "engine-0: killed by SIGKILL; starting it again (1 of 3)" in output
    assert run.processes() == []


def test_two_supervisors_in_one_folder_are_one_too_many(start: Callable[[str], Run]) -> None:
    run = start("training")
    run.wait_for(run.ready, "readiness")

    second = subprocess.run(
        [sys.executable, "-m", "tests.unit.sao.supervisor.standin", str(run.folder.root), "second", "training"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert second.returncode == 1
    assert f"is being run by process {run.process.pid}" in second.stdout
    assert run.process.poll() is None
    (run.folder.root / "finish").touch()
    assert run.process.wait(DEADLINE_S) == 0
