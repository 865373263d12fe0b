"""Finished trajectories on local disk, from before their first Publish until ingest has them.

- A trajectory is here whole, its file and directory fsynced, or not at all: what a crash cut short is set aside.
- One process at a time holds the folder, so nobody offers a file that somebody else is writing.
- A disk that fails costs durability, never a trajectory: `put` says so, and the publisher goes on from memory.
- The disk is touched in threads only: a slow fsync does not stop the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO, TypeVar

from sao.atomic import TEMPORARY_SUFFIX, make_directory
from sao.telemetry.logs import get_logger
from sao.threads import DaemonThreads
from sao.v1 import ingest_pb2 as pb
from services.rollout import metrics
from services.rollout.folder import SUFFIX, DamagedFileError, TrajectoryFolder

log = get_logger(__name__)
T = TypeVar("T")

SET_ASIDE_SUFFIX = ".torn"
_LOCK_FILE = "lock"
_THREADS = 8
"""Writes at a time; each waits for the disk, not for a core."""


class SpoolInUseError(RuntimeError):
    """Another process holds the folder: two workers of the same id, or one that has not ended yet."""


class Spool:
    """One worker's spool in `folder`; what ingest will never take goes on to `dead`."""

    def __init__(self, folder: Path, *, dead: TrajectoryFolder, max_bytes: int) -> None:
        self._folder = TrajectoryFolder(folder)
        self._dead = dead
        self._max_bytes = max_bytes
        self._threads = DaemonThreads(_THREADS, name="spool")
        self._lock: TextIO | None = None
        self._sizes: dict[str, int] = {}

    @property
    def full(self) -> bool:
        """Whether it holds as much as it may: begin nothing that will be added to it."""
        return sum(self._sizes.values()) >= self._max_bytes

    def ids(self) -> list[str]:
        """Of what lies here, oldest first."""
        return sorted(self._sizes)

    async def open(self) -> None:
        """Take the folder, once, with what an earlier process left in it; SpoolInUseError when another holds it.

        A disk that refuses is logged and counted. `put` answers False until a later call has taken the folder.
        """
        if self._lock is not None:
            return
        try:
            self._lock, left = await self._threads.run(self._take)
        except OSError as error:
            self._complain("open", error)
            return
        self._sizes |= left
        self._show()
        if left:
            log.info("spool holds trajectories of an earlier process", trajectories=len(left), bytes=sum(left.values()))

    def _take(self) -> tuple[TextIO, dict[str, int]]:
        folder = self._folder
        make_directory(folder.path)
        with contextlib.ExitStack() as unless_taken:
            lock = unless_taken.enter_context((folder.path / _LOCK_FILE).open("a", encoding="utf-8"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                msg = f"spool {folder.path} is in use by another process; give each worker its own rollout.worker_id"
                raise SpoolInUseError(msg) from error
            ending = f"{SUFFIX}{TEMPORARY_SUFFIX}"
            for torn in folder.path.glob(f".*{ending}"):
                trajectory_id = torn.name.removeprefix(".").removesuffix(ending)
                self._set_aside(torn, trajectory_id, "a process died while it wrote this file")
            left = {trajectory_id: folder.file(trajectory_id).stat().st_size for trajectory_id in folder.ids()}
            unless_taken.pop_all()
        return lock, left

    async def put(self, request: pb.PublishRequest) -> bool:
        """Make it durable here; False, logged and counted, when the disk refuses. A repeat changes nothing.

        A write that has begun is finished, also for a caller that is cancelled meanwhile.
        """
        trajectory_id = request.trajectory.id
        if trajectory_id in self._sizes:
            return True
        if self._lock is None:
            return False
        try:
            with metrics.SPOOL_WRITE_SECONDS.time():
                await self._to_the_end(partial(self._folder.put, request))
        except OSError as error:
            self._complain("write", error, trajectory_id)
            return False
        self._sizes[trajectory_id] = request.ByteSize()
        self._show()
        return True

    async def get(self, trajectory_id: str) -> pb.PublishRequest | None:
        """The request that was put; None when it cannot be read. A damaged file is set aside."""
        try:
            return await self._threads.run(partial(self._folder.get, trajectory_id))
        except DamagedFileError as error:
            file = self._folder.file(trajectory_id)
            await self._try("set aside", trajectory_id, partial(self._set_aside, file, trajectory_id, str(error)))
            self._forget(trajectory_id)
        except FileNotFoundError:
            log.info("gone from the spool: somebody has erased it", trajectory=trajectory_id)
            self._forget(trajectory_id)
        except OSError as error:
            self._complain("read", error, trajectory_id)
        return None

    async def remove(self, trajectory_id: str) -> None:
        """Ingest has it. A file that cannot be removed is a duplicate when the next process offers it."""
        if trajectory_id not in self._sizes:
            return
        await self._try("remove", trajectory_id, partial(self._folder.remove, trajectory_id))
        self._forget(trajectory_id)

    async def bury(self, request: pb.PublishRequest, reason: str) -> None:
        """Ingest will never take it: to the dead folder with the reason. Where that cannot be written it stays here."""
        if await self._try("bury", request.trajectory.id, partial(self._dead.put, request, reason)):
            await self.remove(request.trajectory.id)

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _to_the_end(self, call: Callable[[], T]) -> T:
        ended = await self._threads.start(call)
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            await asyncio.wait([ended])
            raise
        return ended.result()

    async def _try(self, operation: str, trajectory_id: str, call: Callable[[], object]) -> bool:
        try:
            await self._to_the_end(call)
        except OSError as error:
            self._complain(operation, error, trajectory_id)
            return False
        return True

    def _set_aside(self, file: Path, trajectory_id: str, why: str) -> None:
        aside = file.replace(self._folder.path / f"{trajectory_id}{SET_ASIDE_SUFFIX}")
        metrics.SPOOL_SET_ASIDE.inc()
        log.error("file of the spool set aside; what ingest lacks is played again", file=str(aside), reason=why)

    def _complain(self, operation: str, error: OSError, trajectory_id: str = "") -> None:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        metrics.SPOOL_ERRORS.labels(operation, name).inc()
        log.error(
            "the spool's disk refuses: make room or make it writable; until then a killed worker loses what it holds",
            operation=operation,
            folder=str(self._folder.path),
            trajectory=trajectory_id,
            error=str(error),
        )

    def _forget(self, trajectory_id: str) -> None:
        self._sizes.pop(trajectory_id, None)
        self._show()

    def _show(self) -> None:
        metrics.SPOOLED.set(len(self._sizes))
        metrics.SPOOL_BYTES.set(sum(self._sizes.values()))
