"""Children, their sessions, and the guard over them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sao.supervisor.guard import Guard
from sao.supervisor.process import Child, Command, describe_exit, spawn
from sao.supervisor.sessions import end_sessions, members

OWN_GROUP = "import os, signal; os.setpgid(0, 0); signal.pause()"


@pytest.fixture
def guard() -> Iterator[Guard]:
    result = Guard()
    yield result
    result.close()


def command(tmp_path: Path, program: str, *arguments: str, **env: str) -> Command:
    return Command("stand-in", (sys.executable, "-c", program, *arguments), tmp_path / "stand-in.log", env)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def ended(child: Child) -> int:
    """The exit code, once there is one."""
    wait_until(lambda: child.exit_code() is not None)
    code = child.exit_code()
    assert code is not None
    return code


def test_a_child_leads_a_session_that_names_its_descendants(tmp_path: Path, guard: Guard) -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {OWN_GROUP!r}])"

    child = spawn(command(tmp_path, program), guard)

    wait_until(lambda: len(members(child.pid)) == 2)
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    assert end_sessions([child.pid], grace_s=0, reap=child.exit_code) == []
    assert members(child.pid) == []


def test_what_obeys_sigterm_is_not_killed_and_what_does_not_is(tmp_path: Path, guard: Guard) -> None:
    obeying = "import signal, sys; signal.signal(15, lambda *_: sys.exit(5)); print('up', flush=True); signal.pause()"
    stubborn = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
    children = [
        spawn(Command(name, (sys.executable, "-c", program), tmp_path / name), guard)
        for name, program in (("obeying", obeying), ("stubborn", stubborn))
    ]
    wait_until(lambda: all(child.log_tail() for child in children))

    left = end_sessions(
        [child.pid for child in children], grace_s=0.5, reap=lambda: [child.exit_code() for child in children]
    )

    assert left == []
    assert [ended(child) for child in children] == [5, -signal.SIGKILL]


def test_output_goes_to_the_log_and_a_tail_shows_only_this_start(tmp_path: Path, guard: Guard) -> None:
    first = spawn(command(tmp_path, "print('the first')"), guard)
    ended(first)
    second = spawn(command(tmp_path, "import sys; print('one'); print('two', file=sys.stderr)"), guard)
    ended(second)

    assert sorted(second.log_tail()) == ["one", "two"]
    assert second.log_tail(lines=0) == [] or len(second.log_tail(lines=1)) == 1
    assert (tmp_path / "stand-in.log").read_text().startswith("the first\n")


def test_settings_in_the_environment_do_not_reach_a_child(
    tmp_path: Path, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAO__INGEST__PORT", "0")
    monkeypatch.setenv("OTHER", "kept")

    child = spawn(
        command(tmp_path, "import os; print(sorted(set(os.environ) & {'SAO__INGEST__PORT', 'OTHER', 'X'}))", X="1"),
        guard,
    )
    ended(child)

    assert child.log_tail() == ["['OTHER', 'X']"]


def test_only_the_main_thread_may_start_a_child(tmp_path: Path, guard: Guard) -> None:
    errors: list[Exception] = []

    def start() -> None:
        try:
            spawn(command(tmp_path, "pass"), guard)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=start, name="helper")
    thread.start()
    thread.join()

    assert "only the main thread" in str(errors[0])


def test_a_guard_that_was_killed_is_replaced_and_knows_the_sessions(tmp_path: Path) -> None:
    guard = Guard()
    child = spawn(command(tmp_path, "import signal; signal.pause()"), guard)
    old = guard.pid
    os.kill(old, signal.SIGKILL)

    wait_until(lambda: guard.keep() or guard.pid != old)  # type: ignore[func-returns-value]
    guard.close()

    assert ended(child) == -signal.SIGKILL


def test_a_guard_ignores_the_signals_of_a_terminal() -> None:
    guard = Guard()
    ready = Path(f"/proc/{guard.pid}/status")
    # SigIgn names SIGHUP (1), SIGINT (2) and SIGTERM (15): bits 0, 1 and 14.
    wanted = 1 << 0 | 1 << 1 | 1 << 14

    def ignores() -> bool:
        mask = next(line for line in ready.read_text().splitlines() if line.startswith("SigIgn"))
        return int(mask.split()[1], 16) & wanted == wanted

    wait_until(ignores)
    guard.close()
    assert not Path(f"/proc/{guard.pid}").exists()


def test_a_forgotten_session_is_left_alone() -> None:
    guard = Guard()
    other = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    guard.add(other.pid)
    guard.remove(other.pid)

    guard.close()

    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")]
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words
