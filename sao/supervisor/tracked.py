"""One process over its lifetimes: waiting, starting, serving, restarting, ended."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

from sao.supervisor.guard import Guard
from sao.supervisor.plan import Service
from sao.supervisor.process import Child, describe_exit, spawn
from sao.supervisor.sessions import end_sessions

RESTARTS = 3
"""Within RESTART_SPAN_S; one more crash ends the run."""
RESTART_SPAN_S = 600.0
QUIET_END_S = 15.0
"""A process that ended with 0 knows that the run is over before the trainer has ended; after this long it was wrong."""


class State(Enum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    ENDED = "ended"
    """With exit code 0."""


class GaveUpError(RuntimeError):
    """A process crashed too often, or in a way that a restart cannot mend; carries its name and last lines."""

    def __init__(self, name: str, reason: str, tail: list[str]) -> None:
        self.name = name
        self.tail = tail
        super().__init__(f"{name}: {reason}")


class Tracked:
    """A service and its present child."""

    def __init__(self, service: Service, guard: Guard, clock: Callable[[], float] = time.monotonic) -> None:
        self.service = service
        self.state = State.WAITING
        self.child: Child | None = None
        self.starts = 0
        self.ready_once = False
        self.trouble = ""
        """What /healthz complains about; empty when it is content."""
        self._guard = guard
        self._clock = clock
        self._crashes: deque[float] = deque()
        self._start_at = 0.0

    @property
    def name(self) -> str:
        """The service's name."""
        return self.service.name

    def start(self) -> None:
        """Start the child."""
        self.child = spawn(self.service.command(self.starts), self._guard)
        self.starts += 1
        self.state = State.STARTING
        self._start_at = self._clock()

    def became_ready(self) -> float | None:
        """Ask the probe while starting; the seconds it took when the process has just become ready."""
        if self.state is not State.STARTING or not self.service.ready():
            return None
        took_s = self.starting_for_s()
        self.state = State.READY
        self.ready_once = True
        return took_s

    def exited(self) -> str | None:
        """What to tell when the child has just ended; a crash puts it into RESTARTING.

        Raises GaveUpError when it ended too often, before it was ever ready, or because of a setting (exit code 2).
        """
        if self.child is None or self.state not in {State.STARTING, State.READY}:
            return None
        code = self.child.exit_code()
        if code is None:
            return None
        self._bury()
        if code == 0:
            self.state = State.ENDED
            self._start_at = self._clock() + QUIET_END_S
            return "ended"
        tail = self.child.log_tail()
        reason = f"{describe_exit(code)}{_last_words(tail)}"
        if code == 2 or not self.ready_once:
            raise GaveUpError(self.name, reason, tail)
        now = self._clock()
        while self._crashes and self._crashes[0] < now - RESTART_SPAN_S:
            self._crashes.popleft()
        self._crashes.append(now)
        if len(self._crashes) > RESTARTS:
            raise GaveUpError(self.name, f"{reason}; crashed {len(self._crashes)} times", tail)
        self.state = State.RESTARTING
        self._start_at = now + 0.5 * 2 ** (len(self._crashes) - 1)
        return f"{reason}; starting it again ({len(self._crashes)} of {RESTARTS})"

    def due(self) -> bool:
        """Whether a restart is due."""
        again = self.state is State.RESTARTING or (self.state is State.ENDED and not self.service.ends_run)
        return again and self._clock() >= self._start_at

    def starting_for_s(self) -> float:
        """How long the child has been starting; 0 when it isn't."""
        return self._clock() - self._start_at if self.state is State.STARTING else 0.0

    def _bury(self) -> None:
        """End what the child left in its session, so that a restart finds its ports free."""
        if self.child is not None:
            end_sessions([self.child.pid], grace_s=0)
            self._guard.remove(self.child.pid)


def _last_words(tail: list[str]) -> str:
    """The last line of a log for one line of text; a structured one shortened to its event and error."""
    words = next((line.strip() for line in reversed(tail) if line.strip()), "")
    if words.startswith("{"):
        try:
            fields = json.loads(words)
        except ValueError:
            fields = {}
        exception = str(fields.get("exception", "")).strip().splitlines()
        words = ": ".join(filter(None, [str(fields.get("event", "")), exception[-1] if exception else ""])) or words
    return f" ({words[:300]})" if words else ""
