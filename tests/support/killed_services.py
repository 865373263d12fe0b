"""The lives of one trainer or reward service, each a real process, killed (SIGKILL) at a named place.

python -m tests.support.killed_services BACKEND    reads lines of a log file, a run file and the ends of lives in turn

An end is PLACE:N, or `end`: that life of a trainer may finish. Each line is answered by one: `lived`, or what went
otherwise. Lives are forked from this process, so that what takes seconds to import is imported once; BACKEND is
`deepspeed`, or `torch` for the twin that starts in no time.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sao.archive import Archive
from sao.board.redis import RedisBoard
from sao.process import run_service
from sao.streams.redis import RedisStreams
from sao.streams.redis_room import RedisRoom
from sao.weights.filesystem import FileSystemVersionStore
from services.reward import app as reward
from services.trainer import app as trainer
from services.trainer import publisher
from services.trainer.backends.torch_reference import TorchReferenceBackend
from services.trainer.checkpoint import CheckpointStore
from services.trainer.consumer import Consumer
from services.trainer.drops import Drops
from services.trainer.publisher import Publisher
from services.trainer.ranks import Ranks

END = "end"


def _always(*_: object) -> bool:
    return True


def _of_a_checkpoint(path: Path, *_: object) -> bool:
    return path.name.startswith(".update-")


@dataclass(frozen=True)
class Place:
    """Right after, or before, the N-th call of a function."""

    owner: object
    name: str
    before: bool = False
    counts: Callable[..., bool] = _always
    """Which calls do, by their arguments."""
    service: str = "trainer"
    signal: signal.Signals = signal.SIGKILL

    @property
    def exit_code(self) -> int:
        """A life that is only asked to stop ends in good order."""
        return -self.signal if self.signal is signal.SIGKILL else 0


PLACES = {
    "before the step": Place(Ranks, "finish", before=True),
    "stepped": Place(Ranks, "finish"),
    "before the record": Place(Archive, "append", before=True),
    "archived": Place(Archive, "append"),
    "allocated": Place(FileSystemVersionStore, "allocate"),
    "written": Place(publisher, "write_checkpoint"),
    "manifested": Place(FileSystemVersionStore, "_refuse_overtaken"),
    "committed": Place(FileSystemVersionStore, "commit"),
    "announced": Place(RedisBoard, "announce_version"),
    "published": Place(Publisher, "publish"),
    "saving": Place(Ranks, "save"),
    "sealed": Place(CheckpointStore, "_seal"),
    "replacing": Place(Path, "rename", before=True, counts=_of_a_checkpoint),
    "renamed": Place(Path, "rename", counts=_of_a_checkpoint),
    "saved": Place(CheckpointStore, "save"),
    "settled": Place(Consumer, "settle"),
    "holding": Place(Consumer, "hold"),
    "dropping": Place(Drops, "add"),
    "dropped": Place(Consumer, "_let_go"),
    "before the burial": Place(RedisStreams, "bury", before=True),
    "buried": Place(RedisStreams, "bury"),
    "before the move": Place(RedisStreams, "move", before=True, service="reward"),
    "moved": Place(RedisStreams, "move", service="reward"),
    "before the parking": Place(RedisRoom, "park", before=True, service="reward"),
    "parked": Place(RedisRoom, "park", service="reward"),
    "before the join": Place(RedisRoom, "join", before=True, service="reward"),
    "joined": Place(RedisRoom, "join", service="reward"),
    "before the expiry": Place(RedisRoom, "bury", before=True, service="reward"),
    "expired": Place(RedisRoom, "bury", service="reward"),
    "all joined": Place(RedisRoom, "join", service="reward", signal=signal.SIGTERM),
    "all expired": Place(RedisRoom, "bury", service="reward", signal=signal.SIGTERM),
    "scored": Place(RedisStreams, "move", service="reward", signal=signal.SIGTERM),
}
"""Where a life ends."""


class Nursery:
    """Where lives come from: the process above, seen from a test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def live(self, log: Path, run_file: Path, *ends: str) -> None:
        """Return when lives have ended in this way, one after the other; AssertionError with the log's end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("\t".join([str(log), str(run_file), *ends]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer == "lived\n", f"{answer}{log.read_text()[-5000:] if log.exists() else ''}"


@contextlib.contextmanager
def nursery(backend: str) -> Iterator[Nursery]:
    """A nursery, until the block ends; every life of it is killed then."""
    environment = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    command = [sys.executable, "-m", "tests.support.killed_services", backend]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        yield Nursery(process)
        os.killpg(process.pid, signal.SIGKILL)


def main(backend: str) -> None:
    """Answer until the input ends."""
    importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")  # else each life does
    if backend == "torch":
        trainer.new_backend = TorchReferenceBackend  # type: ignore[assignment]
    else:
        from services.trainer.backends import deepspeed

        assert deepspeed  # imported before the first fork
    for line in sys.stdin:
        print(_lived(*line.rstrip("\n").split("\t")), flush=True)  # noqa: T201 - the answer


def _lived(log: str, run_file: str, *ends: str) -> str:
    for end in ends:
        child = os.fork()
        if child == 0:
            _live(log, run_file, end)
        _, status = os.waitpid(child, 0)
        place = PLACES.get(end.partition(":")[0])
        found, expected = os.waitstatus_to_exitcode(status), 0 if place is None else place.exit_code
        if found != expected:
            return f"the life until {end} ended with {found}, expected {expected}"
    return "lived"


def _live(log: str, run_file: str, end: str) -> NoReturn:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    service = "trainer"
    if end != END:
        name, _, number = end.partition(":")
        service = PLACES[name].service
        _end_at(PLACES[name], int(number))
    sys.argv = [service, "--config", run_file]
    try:
        trainer.main() if service == "trainer" else run_service("reward", reward.main)
    except SystemExit as ended:
        os._exit(int(ended.code or 0))
    finally:
        os._exit(99)


def _end_at(place: Place, number: int) -> None:
    function: Callable[..., Any] = getattr(place.owner, place.name)
    left = number

    def count(arguments: tuple[Any, ...], *, before: bool) -> None:
        nonlocal left
        counted = place.before is before and place.counts(*arguments)
        left -= counted
        if counted and left == 0:
            os.kill(os.getpid(), place.signal)

    def called(*arguments: Any, **keywords: Any) -> Any:
        count(arguments, before=True)
        result = function(*arguments, **keywords)
        count(arguments, before=False)
        return result

    async def waited(*arguments: Any, **keywords: Any) -> Any:
        count(arguments, before=True)
        result = await function(*arguments, **keywords)
        count(arguments, before=False)
        return result

    setattr(place.owner, place.name, waited if inspect.iscoroutinefunction(function) else called)


if __name__ == "__main__":
    main(sys.argv[1])
