"""One child process: started in a session of its own, logged to a file, dead when the supervisor is."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sao.supervisor.guard import Guard

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Command:
    """What to start, under which name, and where its output goes."""

    name: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's own environment."""


class Child:
    """A running child and the session it leads."""

    def __init__(self, command: Command, process: subprocess.Popen[bytes], log_start: int) -> None:
        self.command = command
        self._process = process
        self._log_start = log_start

    @property
    def name(self) -> str:
        """The command's name."""
        return self.command.name

    @property
    def pid(self) -> int:
        """Its process id, which is its session's and group's too."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """How it ended (negative: by that signal), None while it runs."""
        return self._process.poll()

    def log_tail(self, lines: int = 20) -> list[str]:
        """The last lines this child wrote, an earlier one of the same name left out."""
        with self.command.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - 65536))
            return file.read().decode("utf-8", "replace").splitlines()[-lines:]


def spawn(command: Command, guard: Guard) -> Child:
    """Start a command; it dies with the calling process.

    Only from the main thread: the kernel sends the parent-death signal when the *thread* that spawned ends.
    """
    if threading.current_thread() is not threading.main_thread():
        msg = f"{command.name} was to be started from {threading.current_thread().name}: only the main thread may"
        raise RuntimeError(msg)
    command.log.parent.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()

    def die_with_parent() -> None:
        # Between fork and exec: nothing here may take a lock, so one system call and one check.
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    with command.log.open("ab") as log:
        start = log.tell()
        process = subprocess.Popen(  # noqa: S603  # argv comes from plan.py, no shell
            command.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=inherited_environment() | dict(command.env),
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  # the reason this wrapper exists; it takes no lock
        )
    guard.add(process.pid)
    return Child(command, process, start)


def inherited_environment() -> dict[str, str]:
    """The supervisor's environment without settings: they are in the run file by now, ports filled in."""
    return {key: value for key, value in os.environ.items() if not key.startswith("SAO__")}


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
