"""Health that means progress: a process that has work and gets nothing done is not alive, however well it listens.

idle ──working()──▶ working ──idle()──▶ idle
                      │ progress() restarts the stall clock; working() again does not
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Health:
    """The process's own account of itself; every method may be called from any thread."""

    def __init__(self, stalled_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`stalled_after_s`: longest time between two signs of progress while there is work; `clock` in seconds."""
        if not stalled_after_s > 0:
            msg = f"stalled_after_s must be positive, found {stalled_after_s}"
            raise ValueError(msg)
        self._stalled_after_s = stalled_after_s
        self._clock = clock
        self._lock = threading.Lock()
        self._work: str | None = None
        self._reason = "starting"
        self._since = clock()
        self._ready = False

    def working(self, what: str) -> None:
        """There is work from now on.

        While there was work already this only changes what it is called: a loop that spins without finishing
        anything must not look alive.
        """
        with self._lock:
            if self._work is None:
                self._since = self._clock()
            self._work = what

    def progress(self) -> None:
        """Something was done: the stall clock starts anew. Work stays work until `idle`."""
        with self._lock:
            self._since = self._clock()

    def idle(self, reason: str) -> None:
        """There is nothing to do, and that is fine."""
        with self._lock:
            self._work = None
            self._reason = reason
            self._since = self._clock()

    def set_ready(self, ready: bool) -> None:
        """Whether others may send work here."""
        with self._lock:
            self._ready = ready

    def alive(self) -> tuple[bool, str]:
        """Whether this process makes progress or has nothing to do, and a sentence that says which."""
        with self._lock:
            for_s = self._clock() - self._since
            if self._work is None:
                return True, f"idle for {for_s:.1f} s: {self._reason}"
            if for_s > self._stalled_after_s:
                limit = self._stalled_after_s
                return (
                    False,
                    f"stalled: no progress for {for_s:.1f} s (limit {limit:g} s) with work to do: {self._work}",
                )
            return True, f"working: {self._work}; last progress {for_s:.1f} s ago"

    def ready(self) -> tuple[bool, str]:
        """Whether others may send work here, and a sentence that says so."""
        with self._lock:
            return self._ready, "ready" if self._ready else "not ready"
