"""One process per data-parallel rank, in the environment torch.distributed reads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

from sao.telemetry.logs import get_logger

log = get_logger(__name__)

_STOP_DEADLINE_S = 10.0
_PR_SET_PDEATHSIG = 1


def own_rank() -> int:
    """The rank of this process; 0 when nobody has set one."""
    return int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def started_followers(ranks: int) -> Iterator[None]:
    """Ranks 1.. as children with this process's own command line, unless a launcher (torchrun) has started them.

    The children end with this process, however it ends.
    """
    if ranks == 1 or "WORLD_SIZE" in os.environ:
        yield
        return
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"}
    children = [_start(rank) for rank in range(1, ranks)]
    try:
        yield
    finally:
        for rank, child in enumerate(children, start=1):
            _end(rank, child)


def _start(rank: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    command = [sys.executable, "-m", "services.trainer", *sys.argv[1:]]
    return subprocess.Popen(command, env=environment, preexec_fn=_die_with_parent)  # noqa: PLW1509, S603


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(rank: int, child: subprocess.Popen[bytes]) -> None:
    try:
        status = child.wait(timeout=_STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        log.warning("rank did not end, killing it", rank=rank)
        child.kill()
        status = child.wait()
    if status:
        log.error("rank failed", rank=rank, status=status)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
