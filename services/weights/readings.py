"""What the files of versions hold, read once: also those of a version that is still being written.

- A file is known by its inode, size and time of change; one that differs in any of them is another file.
- A version's files are read as soon as the trainer has written them, while it makes the manifest and commits, so that
  an inspection finds most of its work done. What was read too early (a file that was being written, or seen through a
  cache of NFS) does not agree with the manifest and is read again; nothing is refused on a reading from before.
- Files are read side by side, at most one thread for each core. Nobody waits twice for the same file.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sao.telemetry.logs import get_logger
from sao.weights.base import IncompleteVersionError, VersionStore, VersionStoreError
from sao.weights.checkpoint import FileReading, read_file
from services.weights import metrics

log = get_logger(__name__)
_KEPT = 1024
"""Files."""
_EARLY_MOST = 2
"""Readings of one file before its version is committed: a slow writer's files are not read again and again."""

Identity = tuple[int, int, int, int]


def identity(file: Path) -> Identity:
    """Device, inode, size and time of the last change."""
    stat = file.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True)
class _Kept:
    at: float
    """Before it was read."""
    reading: Future[FileReading]


class Readings:
    """One for the fleet, used from several threads."""

    def __init__(self, *, fresh_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`fresh_s`: an older reading no longer counts, its bytes may have left the page cache."""
        self._fresh_s = fresh_s
        self._clock = clock
        self._kept: OrderedDict[Identity, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._cores = threading.BoundedSemaphore(os.cpu_count() or 1)

    def begin(self, file: Path) -> Future[FileReading]:
        """What the file holds, or will when it has been read; OSError here, or from the result."""
        with self._lock:
            key, now = identity(file), self._clock()
            known = self._kept.get(key)
            if known is not None and now - known.at <= self._fresh_s and not _failed(known.reading):
                return known.reading
            made = _Kept(now, Future())
            self._kept[key] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        # A daemon: a file system that hangs must not keep the service from ending.
        threading.Thread(target=self._read, args=(file, made.reading), name="readings", daemon=True).start()
        return made.reading

    def _read(self, file: Path, into: Future[FileReading]) -> None:
        with self._cores:
            try:
                into.set_result(read_file(file))
            except BaseException as error:  # noqa: BLE001 - the thread's edge: whoever waits gets it
                into.set_exception(error)

    def verify(self, store: VersionStore, version: str) -> list[FileReading]:
        """Compare all of a version's files with its manifest; what was found in them.

        IncompleteVersionError when one differs, by a reading that began after this call; OSError.
        """
        started, files = self._clock(), _files(store.path(version))
        try:
            return self._verify(store, version, files)
        except IncompleteVersionError:
            if not self._forget(files, before=started):
                raise
            return self._verify(store, version, files)

    def _verify(self, store: VersionStore, version: str, files: list[Path]) -> list[FileReading]:
        found = [self.begin(file) for file in files]
        store.verify(version, lambda file: self.begin(file).result().sha256)
        return [one.result() for one in found]

    def _forget(self, files: Iterable[Path], *, before: float) -> bool:
        """Whether there was anything to forget."""
        with self._lock:
            old = [
                key
                for file in files
                if file.is_file() and (key := identity(file)) in self._kept and self._kept[key].at < before
            ]
            for key in old:
                del self._kept[key]
        return bool(old)


class ReadAhead:
    """Looks at what the trainer is writing, again and again, and has read what no longer changes."""

    def __init__(self, store: VersionStore, readings: Readings) -> None:
        self._store = store
        self._readings = readings
        self._seen: dict[Path, Identity] = {}
        self._begun: dict[Path, list[Identity]] = {}

    def look(self) -> None:
        """Once: a file that is as it was at the look before is read now."""
        seen: dict[Path, Identity] = {}
        for file in (file for directory in self._store.staged() for file in _staged_files(directory)):
            with suppress(FileNotFoundError):  # committed or given up since
                seen[file] = identity(file)
                begun = self._begun.setdefault(file, [])
                still = self._seen.get(file) == seen[file] and seen[file] not in begun
                if still and len(begun) < _EARLY_MOST:
                    self._readings.begin(file)
                    begun.append(seen[file])
        self._seen = seen
        self._begun = {file: begun for file, begun in self._begun.items() if file in seen}

    async def run(self, stop: asyncio.Event, every_s: float) -> None:
        """Look until told to stop. What can't be read now is read when the version is inspected."""
        while not stop.is_set():
            try:
                await asyncio.to_thread(self.look)
            except (VersionStoreError, OSError) as error:
                metrics.STORE_ERRORS.labels("store").inc()
                log.warning("what is being written can't be read ahead", error=str(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await stop.wait()


def _staged_files(directory: Path) -> list[Path]:
    try:
        return _files(directory)
    except FileNotFoundError:  # committed or given up while it was listed
        return []


def _files(directory: Path) -> list[Path]:
    return sorted(file for file in directory.rglob("*") if file.is_file())


def _failed(reading: Future[FileReading]) -> bool:
    return reading.done() and reading.exception() is not None
