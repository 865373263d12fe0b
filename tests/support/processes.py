"""Start real servers for tests, wait for a condition instead of a time, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str, poll_s: float = 0.05) -> None:
    """Return as soon as `condition` holds; AssertionError naming `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            msg = f"waited {timeout_s} s for {what}"
            raise AssertionError(msg)
        time.sleep(poll_s)


@contextlib.contextmanager
def server(
    command: Sequence[str],
    *,
    log: Path,
    ready: Callable[[], bool],
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own until the block ends; its whole group is killed then."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
    try:

        def up() -> bool:
            if process.poll() is not None:
                msg = f"{command[0]} ended with {process.returncode}:\n{log.read_text()[-3000:]}"
                raise AssertionError(msg)
            return ready()

        wait_until(up, timeout_s=timeout_s, what=f"{' '.join(command[:3])} (log {log})", poll_s=0.1)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
