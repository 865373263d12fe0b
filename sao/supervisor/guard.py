"""The guard: a small process that outlives a killed supervisor just long enough to end what it left.

It reads lines from a pipe that only the supervisor holds open: `+PID` registers a session, `-PID` forgets it.
The pipe ends when the supervisor does, however that happens; then every registered session gets SIGKILL.
PR_SET_PDEATHSIG alone would not do: it reaches children, not an engine's own children.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import IO

from sao.supervisor.sessions import end_sessions


def main() -> None:
    """Watch the pipe on standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        session = int(line[1:])
        if line[0] == "+":
            sessions.add(session)
        else:
            sessions.discard(session)
    end_sessions(sessions, grace_s=0)


class Guard:
    """The supervisor's end of the pipe."""

    def __init__(self) -> None:
        self._sessions: set[int] = set()
        self._process = self._start()

    def add(self, session: int) -> None:
        """Have the session ended if this process dies."""
        self._sessions.add(session)
        self._tell(f"+{session}\n")

    def remove(self, session: int) -> None:
        """The session has ended; its number may be another's soon."""
        self._sessions.discard(session)
        self._tell(f"-{session}\n")

    def keep(self) -> None:
        """Start another guard when somebody killed this one."""
        if self._process.poll() is not None:
            self._process = self._start()
            for session in sorted(self._sessions):
                self._tell(f"+{session}\n")

    def close(self) -> None:
        """Let go; what is still registered is killed."""
        self._pipe.close()
        self._process.wait(timeout=10)

    @property
    def pid(self) -> int:
        """The guard's process id."""
        return self._process.pid

    @property
    def _pipe(self) -> IO[str]:
        if self._process.stdin is None:
            msg = "the guard was started without a pipe"
            raise RuntimeError(msg)
        return self._process.stdin

    def _tell(self, line: str) -> None:
        try:
            self._pipe.write(line)
            self._pipe.flush()
        except BrokenPipeError:
            self._process.wait(timeout=10)
            self.keep()

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "sao.supervisor.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )


if __name__ == "__main__":
    main()
