"""The lives of one trainer, each a real process, killed at a named place; the next one goes on from what it left.

python -m tests.support.killed_trainer     reads lines of a log file, a run file and the ends of its trainer's lives

An end is PLACE:N, or `end`: that life may finish. Each line is answered by one: `lived`, or what went otherwise. Lives
are forked from this process, so that what takes seconds to import is imported once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from sao.archive import Archive
from services.trainer import app
from services.trainer.backends import deepspeed
from services.trainer.checkpoint import CheckpointStore
from services.trainer.consumer import Consumer
from services.trainer.publisher import Publisher
from services.trainer.ranks import Ranks

END = "end"
PLACES: dict[str, tuple[type, str, bool]] = {
    "stepped": (Ranks, "finish", False),
    "archived": (Archive, "append", False),
    "published": (Publisher, "publish", True),
    "saving": (Ranks, "save", False),
    "saved": (CheckpointStore, "save", False),
    "holding": (Consumer, "hold", True),
}
"""Where a life ends: right after the N-th call of this method, which is awaited when it says so."""


def main() -> None:
    """Answer until the input ends."""
    assert deepspeed  # imported before the first fork
    for line in sys.stdin:
        print(_lived(*line.split()), flush=True)  # noqa: T201 - the answer


def _lived(log: str, run_file: str, *ends: str) -> str:
    for end in ends:
        child = os.fork()
        if child == 0:
            _live(log, run_file, end)
        _, status = os.waitpid(child, 0)
        found, expected = os.waitstatus_to_exitcode(status), 0 if end == END else -signal.SIGKILL
        if found != expected:
            return f"the life until {end} ended with {found}, expected {expected}"
    return "lived"


def _live(log: str, run_file: str, end: str) -> NoReturn:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    if end != END:
        place, _, number = end.partition(":")
        _kill_after(*PLACES[place], int(number))
    sys.argv = ["trainer", "--config", run_file]
    try:
        app.main()
    except SystemExit as ended:
        os._exit(int(ended.code or 0))
    finally:
        os._exit(99)


def _kill_after(owner: type, name: str, awaited: bool, number: int) -> None:
    method: Callable[..., Any] = getattr(owner, name)
    left = number

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def called(*arguments: Any, **keywords: Any) -> Any:
        result = method(*arguments, **keywords)
        count()
        return result

    async def waited(*arguments: Any, **keywords: Any) -> Any:
        result = await method(*arguments, **keywords)
        count()
        return result

    setattr(owner, name, waited if awaited else called)


if __name__ == "__main__":
    main()
