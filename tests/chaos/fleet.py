"""The run's processes under a keeper that never gives up: whatever ends is started again, as a cluster would.

`sao up` stops a run whose process crashes four times within ten minutes, which is right for people and wrong here.
One thread, no callbacks: `tick` looks once at everything, as in sao.supervisor.supervisor.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sao.supervisor.guard import Guard
from sao.supervisor.plan import MODEL, Service
from sao.supervisor.process import Child, describe_exit, spawn
from sao.supervisor.sessions import end_sessions, members

RESTART_AFTER_S = 0.5
TICK_S = 0.25
"""Asking everybody whether it is ready costs a seventh of a core at ten times a second."""
GRACE_S = 10.0
"""For the orderly end of a process, before it is killed."""


@dataclass
class _Member:
    service: Service
    child: Child | None = None
    start_at: float = 0.0
    starts: int = 0
    retired: bool = False
    ready: bool = False


@dataclass
class Fleet:
    """Every process of one run."""

    services: Sequence[Service]
    logs: Path
    """A log file for each start: <name>.<start>.log."""
    earlier_starts: int
    """How often the run was started before: engines then sample anew, and logs are not appended to."""
    note: Callable[[str, str], None]
    """Takes a process's name and what it did by itself."""
    sessions: set[int] = field(default_factory=set)
    """Of every process that was ever started."""

    def __post_init__(self) -> None:
        self._guard = Guard()
        self._members = {service.name: _Member(service) for service in self.services}

    def tick(self) -> None:
        """Start what can start, note what ended."""
        self._guard.keep()
        for one in self._members.values():
            if one.child is not None and (code := one.child.exit_code()) is not None:
                self._bury(one)
                one.start_at = time.monotonic() + RESTART_AFTER_S
                self.note(one.service.name, describe_exit(code))
            if one.child is None and not one.retired and self._may_start(one):
                command = one.service.command(self.earlier_starts + one.starts)
                log = self.logs / f"{command.name}.{self.earlier_starts:03d}-{one.starts:03d}.log"
                one.child = spawn(replace(command, log=log), self._guard)
                self.sessions.add(one.child.pid)
                one.starts += 1
            one.ready = one.child is not None and (one.ready or one.service.ready())

    def unready(self) -> list[str]:
        """Who does not answer that it is ready, asked now."""
        alive = [one for one in self._members.values() if not one.retired]
        return [one.service.name for one in alive if one.child is None or not one.service.ready()]

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Tick until the condition holds, then True; False when the time is over."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.tick()
            time.sleep(TICK_S)
        return True

    def keep(self, seconds: float) -> None:
        """Tick for this long."""
        deadline = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= deadline, seconds + 1)

    def pid(self, name: str) -> int | None:
        """Of the process itself; None while it is down."""
        child = self._members[name].child
        return child.pid if child is not None else None

    def signal(self, name: str, number: signal.Signals, *, all_of_it: bool = False) -> bool:
        """Send a signal to the process, or to everything in its session; whether there was one to take it."""
        pid = self.pid(name)
        if pid is None:
            return False
        try:
            for each in members(pid) if all_of_it else [pid]:
                os.kill(each, number)
        except ProcessLookupError:
            return False
        return True

    def retire(self, *names: str, timeout_s: float = 30.0) -> bool:
        """End these in good order and do not start them again; whether they did end in time."""
        for name in names:
            self._members[name].retired = True
            self.signal(name, signal.SIGTERM)
        return self.wait(lambda: all(self.pid(name) is None for name in names), timeout_s)

    def stop(self) -> list[int]:
        """End everything; the pids of all sessions that are left (none, unless something is wrong)."""
        children = [one.child for one in self._members.values() if one.child is not None]

        def reap() -> None:
            for child in children:
                child.exit_code()

        for name in self._members:
            self.signal(name, signal.SIGCONT, all_of_it=True)
        end_sessions([child.pid for child in children], grace_s=GRACE_S, reap=reap)
        self._guard.close()
        return sorted(pid for session in self.sessions for pid in members(session))

    def _may_start(self, one: _Member) -> bool:
        waits_for = one.service.after - {MODEL}
        return time.monotonic() >= one.start_at and all(self._members[name].ready for name in waits_for)

    def _bury(self, one: _Member) -> None:
        if one.child is not None:
            end_sessions([one.child.pid], grace_s=0)
            self._guard.remove(one.child.pid)
        one.child = None
        one.ready = False
