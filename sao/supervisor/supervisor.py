"""The loop of `sao up`: start what can start, see who is ready, restart who crashed, stop everything.

One thread and no callbacks: `tick` looks once at everything; signals only set a flag. Whatever ends the loop, `stop`
leaves no process behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum

from sao.config.schema import UP_GRACE_S
from sao.supervisor.folder import ProcessState, RunFolder
from sao.supervisor.guard import Guard
from sao.supervisor.plan import MODEL, Service
from sao.supervisor.probes import http_text
from sao.supervisor.process import Child, Command, describe_exit, spawn
from sao.supervisor.sessions import end_sessions
from sao.supervisor.tracked import GaveUpError, State, Tracked

HEALTH_EVERY_S = 1.0
"""One process is asked at a time, in turn."""

Tell = Callable[[str, str], None]
"""Shows an event: process name, what happened."""


class Outcome(Enum):
    RUNNING = "running"
    FINISHED = "finished"
    """The trainer has made its updates and ended with 0."""


class Supervisor:
    """Every process of one run."""

    def __init__(
        self,
        services: Sequence[Service],
        folder: RunFolder,
        tell: Tell,
        *,
        warm_start: Command | None,
        start_timeout_s: float,
    ) -> None:
        self._folder = folder
        self._tell = tell
        self._guard = Guard()
        self._warm_start_command = warm_start
        self.warm_start: Child | None = None
        self.tracked = [Tracked(service, self._guard) for service in services]
        self._ready: set[str] = set() if warm_start else {MODEL}
        self._start_timeout_s = start_timeout_s
        self._health_at = 0.0
        self._health_turn = 0

    def tick(self) -> Outcome:
        """Look once at everything. Raises GaveUpError when the run cannot go on."""
        self._guard.keep()
        self._make_model()
        changed = False
        for one in self.tracked:
            if (one.state is State.WAITING and one.service.after <= self._ready) or one.due():
                self._start(one)
                changed = True
            took_s = one.became_ready()
            if took_s is not None:
                self._ready.add(one.name)
                self._note(one, "ready", f"ready after {took_s:.0f} s, {one.service.address}")
                changed = True
            event = one.exited()
            if event is not None:
                self._note(one, "ended" if one.state is State.ENDED else "restarted", event)
                changed = True
            elif one.starting_for_s() > self._start_timeout_s:
                tail = one.child.log_tail() if one.child else []
                raise GaveUpError(one.name, f"not ready within {self._start_timeout_s:.0f} s", tail)
        self._ask_health()
        if changed:
            self._write()
        finished = any(one.service.ends_run and one.state is State.ENDED for one in self.tracked)
        return Outcome.FINISHED if finished else Outcome.RUNNING

    @property
    def all_ready(self) -> bool:
        """Whether every process is ready."""
        return all(one.state is State.READY for one in self.tracked)

    @property
    def board_is_up(self) -> bool:
        """Whether asking the board can succeed: not before an embedded Valkey is ready."""
        return all(one.name != "valkey" or one.state is State.READY for one in self.tracked)

    def stop(self, *, grace_s: float = UP_GRACE_S) -> list[int]:
        """End every process; the pids that could not be ended (none, unless the kernel holds one)."""
        children = [one.child for one in self.tracked if one.child is not None]
        if self.warm_start is not None:
            children.append(self.warm_start)

        def reap() -> None:
            for child in children:
                child.exit_code()

        left = end_sessions([child.pid for child in children], grace_s=grace_s, kill_s=1.5, reap=reap)
        for child in children:
            if child.pid not in left:
                self._guard.remove(child.pid)
        self._guard.close()
        self._folder.write_processes([])
        return left

    def _make_model(self) -> None:
        if MODEL in self._ready or self._warm_start_command is None:
            return
        if self.warm_start is None:
            self.warm_start = spawn(self._warm_start_command, self._guard)
            self._folder.note("started", "warm-start")
            self._tell("warm-start", "teaching the tiny model its task's language (cached afterwards)")
            return
        code = self.warm_start.exit_code()
        if code is None:
            return
        if code != 0:
            raise GaveUpError(self.warm_start.name, describe_exit(code), self.warm_start.log_tail())
        self._guard.remove(self.warm_start.pid)
        self.warm_start = None
        self._ready.add(MODEL)
        self._folder.note("ready", "warm-start")
        self._tell("warm-start", "done")

    def _start(self, one: Tracked) -> None:
        one.start()
        self._folder.note("started", one.name)

    def _note(self, one: Tracked, event: str, detail: str) -> None:
        self._folder.note(event, one.name, detail)
        self._tell(one.name, detail)

    def _ask_health(self) -> None:
        """Ask the next process in turn whether it makes progress."""
        if time.monotonic() < self._health_at or not self.tracked:
            return
        self._health_at = time.monotonic() + HEALTH_EVERY_S
        self._health_turn = (self._health_turn + 1) % len(self.tracked)
        one = self.tracked[self._health_turn]
        if one.state is not State.READY or one.service.health is None:
            return
        status, body = http_text(one.service.health)
        trouble = "" if status == 200 else body.strip()[:200]
        if status is None and one.child is not None and one.child.exit_code() is not None:
            return  # it is gone, which the next tick tells better
        if trouble and one.trouble:
            return
        if trouble and status is not None:
            self._tell(one.name, f"not healthy: {trouble}")
        one.trouble = trouble

    def _write(self) -> None:
        self._folder.write_processes(
            [
                ProcessState(
                    name=one.name,
                    pid=one.child.pid if one.child and one.state in {State.STARTING, State.READY} else None,
                    state=one.state.value,
                    address=one.service.address,
                    starts=one.starts,
                )
                for one in self.tracked
            ]
        )
