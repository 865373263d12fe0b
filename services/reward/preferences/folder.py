"""Every change of the preferences in the run's folder: for people to read, and so that a store may lose its file.

    <run.dir>/preferences/audit.jsonl        one record (sao/preference_changes.py) a line; only ever appended to

Any number of reward services write it: whoever has the file's lock appends what the board has recorded and the file
lacks, and makes it durable for all. What the board has lost comes back from it.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from sao.atomic import fsync_directory, make_directory
from sao.board.base import Board, BoardBehindError
from sao.preference import Preference
from sao.preference_changes import MAX_SCHEDULED, ChangeRequest, Kept, PreferenceChange
from sao.streams.base import StreamError
from sao.telemetry.logs import get_logger
from sao.threads import DaemonThreads
from services.reward import metrics

T = TypeVar("T")

log = get_logger(__name__)

FOLDER = "preferences"
FILE = "audit.jsonl"
KEEP_EVERY_S = 0.5
RECENT = 4096
"""Records remembered, to tell whether one that was accepted is the one that was kept."""
LOCK_WITHIN_S = 5.0
"""Longest wait for another process that writes; then the folder counts as refusing."""
LOOK_HOLDS_S = 0.05
"""So long a look at the file answers for it: no store loses records and is back in less."""
_LOCK_POLL_S = 0.001
_OLDER = re.compile(r"(\d{8,})\.json")


class PreferenceFolder:
    """The folder of one run, seen by one process; made at the first write. One thread may `keep` while others look."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FOLDER
        self._end = 0
        self._newest = 0
        self._durable = 0
        self._recent: dict[int, PreferenceChange] = {}
        self._seen = threading.Lock()  # around what was read of the file, never around waiting for a disk

    def newest(self) -> int:
        """The newest version kept; 0: none."""
        return self.read_all().version

    def read_all(self) -> Kept:
        """Everything kept; a line that is damaged is left out, and logged."""
        data = self._file.read_bytes() if self._file.exists() else b""
        return Kept.of(_records(data[: data.rfind(b"\n") + 1], str(self._file)), older=self._older())

    @property
    def seen(self) -> int:
        """Number of the newest record that was in the file at the last look."""
        return self._newest

    def known(self) -> int:
        """Number of the newest record in the file, durable or not; 0: none."""
        if self._file.exists():
            with self._file.open("rb") as file:
                self._look(file.fileno())
        else:
            with self._seen:
                self._forget()
        return self._newest

    def durable(self, change: PreferenceChange) -> bool | None:
        """Whether this very record is in the file for good; None when its number has not come yet."""
        if change.seq > self._durable:
            return None
        return self._recent.get(change.seq) == change

    def keep(self, changes: Sequence[PreferenceChange]) -> None:
        """Append those that the file lacks, all of it durable on return; nothing that follows a gap."""
        with self._locked() as descriptor:
            whole = self._look(descriptor)
            lacking = [change for change in changes if change.seq > self._newest]
            if lacking and lacking[0].seq == self._newest + 1:
                data = b"".join(change.line().encode() + b"\n" for change in lacking)
                if os.fstat(descriptor).st_size > whole:
                    os.ftruncate(descriptor, whole)  # a line that a crash or a full disk cut short
                _write(descriptor, data)
                with self._seen:
                    self._take(lacking, whole + len(data))
            os.fsync(descriptor)  # also what somebody wrote who was killed before this
            self._durable = self._newest

    @property
    def _file(self) -> Path:
        return self._path / FILE

    @contextmanager
    def _locked(self) -> Iterator[int]:
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            make_directory(self._path)
            descriptor = os.open(self._file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            fsync_directory(self._path)
        try:
            _lock(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)

    def _look(self, descriptor: int) -> int:
        """Take in what is new in the file; where its last whole line ends."""
        with self._seen:
            size = os.fstat(descriptor).st_size
            if size < self._end:  # somebody removed or cut it: what the board has is written again
                self._forget()
            data = os.pread(descriptor, size - self._end, self._end)
            whole = data[: data.rfind(b"\n") + 1]
            self._take(_records(whole, str(self._file)), self._end + len(whole))
            return self._end

    def _take(self, changes: Iterable[PreferenceChange], end: int) -> None:
        for change in changes:
            self._newest = max(self._newest, change.seq)
            self._recent[change.seq] = change
        while len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        self._end = end

    def _forget(self) -> None:
        self._end = self._newest = self._durable = 0
        self._recent.clear()

    def _older(self) -> list[Preference]:
        """Versions that an earlier release kept, a file each."""
        paths = sorted(self._path.iterdir()) if self._path.exists() else []
        found = []
        for path in paths:
            if _OLDER.fullmatch(path.name):
                try:
                    found.append(Preference.model_validate_json(path.read_bytes()))
                except ValidationError as error:
                    log.error("a kept preference is damaged", file=str(path), error=str(error))  # noqa: TRY400
        return found


def _records(data: bytes, file: str) -> Iterator[PreferenceChange]:
    for line in data.splitlines():
        try:
            yield PreferenceChange.model_validate_json(line)
        except ValidationError as error:
            log.error("a record of a preference change is damaged", file=file, error=str(error))  # noqa: TRY400


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + LOCK_WITHIN_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                msg = f"another process has held the lock of {FILE} for {LOCK_WITHIN_S:g} s"
                raise OSError(msg) from None
            time.sleep(_LOCK_POLL_S)
        else:
            return


def _write(descriptor: int, data: bytes) -> None:
    written = os.write(descriptor, data)
    if written != len(data):
        msg = f"the disk took {written} of {len(data)} bytes"
        raise OSError(msg)


class LostChangeError(Exception):
    """The board accepted a change and then lost it: it was emptied, or came back with an older file."""


class Keeper:
    """Brings board and folder together, makes accepted changes durable, and lets scheduled ones take effect.

    It says once when the folder refuses and once when it takes again.
    """

    def __init__(self, board: Board, folder: PreferenceFolder, *, min_seconds: float = 0.0) -> None:
        self._board = board
        self._folder = folder
        self._min_seconds = min_seconds
        self._refused = False
        self._one = asyncio.Lock()
        self._threads = DaemonThreads(2, name="preference-folder")  # not asyncio's own: dry runs may take all of those
        self._looked_s = -math.inf
        self._unkept: dict[int, PreferenceChange] = {}
        self._tries = 0

    async def run(self) -> None:
        """Until cancelled; a store that does not answer is asked again the next time."""
        while True:
            try:
                await self.once()
                await self.apply()
            except StreamError as error:
                metrics.STORE_RETRIES.inc()
                log.warning("preferences could not be compared with the board's", error=str(error))
            await asyncio.sleep(KEEP_EVERY_S)

    async def once(self) -> None:
        """Reconcile; a folder that refuses is counted and asked again the next time. StreamError: the board refused."""
        await self._known()
        async with self._one:
            await self._guarded(self._reconcile)
            self._tries += 1

    async def change(self, asked: ChangeRequest) -> PreferenceChange | None:
        """Have the board make a change, durable on return: on disk, or in the store alone while the folder refuses.

        What Board.change_preferences raises, and LostChangeError.
        """
        above = await self._known(old_s=LOOK_HOLDS_S)
        try:
            made = await self._board.change_and_follow(asked, above=above, min_seconds=self._min_seconds)
        except BoardBehindError:
            await self.once()
            above = await self._known()
            made = await self._board.change_and_follow(asked, above=above, min_seconds=self._min_seconds)
        if not made:
            return None
        await self._keep(made)
        return made[-1]

    async def apply(self) -> None:
        """Let every scheduled switch that is due take effect, or be refused; replicas may do so at once."""
        for _ in range(MAX_SCHEDULED):
            try:
                change = await self.change(ChangeRequest(what="apply"))
            except (BoardBehindError, LostChangeError) as error:
                log.warning("scheduled preferences wait for the board's records", error=str(error))
                return
            if change is None:
                break
            log.info("scheduled preference", **change.model_dump(mode="json", exclude_none=True, exclude={"document"}))
        metrics.SCHEDULED.set(len(await self._board.scheduled_preferences()))
        metrics.HELD.set((await self._board.preference_hold()).held)

    async def _known(self, *, old_s: float = 0.0) -> int:
        """The newest record that the folder shows, or showed last when it cannot be read; `old_s`: a look's age."""
        if time.monotonic() - self._looked_s >= old_s:
            await self._guarded(partial(self._in_thread, self._folder.known))
        return self._folder.seen

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """A look at the folder, or more."""
        began_s = time.monotonic()
        found = await self._threads.run(call)
        self._looked_s = began_s
        return found

    async def _keep(self, made: Sequence[PreferenceChange]) -> None:
        change, tries = made[-1], self._tries
        self._unkept.update((one.seq, one) for one in made)
        # Who waits here finds the record kept already, mostly: one fsync is for all that came while one was at work.
        async with self._one:
            # A try that began after this change and failed is this change's too.
            if self._folder.durable(change) is None and self._tries <= tries + 1:
                with metrics.KEEP_SECONDS.time():
                    await self._guarded(partial(self._write, change))
                self._tries += 1
            kept = self._folder.durable(change)
            if kept is None:
                kept = change in await self._board.preference_changes(change.seq - 1)
        if not kept:
            msg = f"the store lost change {change.seq} while it was made; read the preference, then repeat"
            raise LostChangeError(msg)

    async def _write(self, change: PreferenceChange) -> None:
        """Append what was made here and what came with it; ask the board only where that leaves a gap."""
        made, self._unkept = self._unkept, {}  # what the disk refuses is the board's to tell again
        changes: list[PreferenceChange] = []
        while (number := self._folder.seen + len(changes) + 1) in made:
            changes.append(made[number])
        if change in changes:
            await self._in_thread(partial(self._folder.keep, changes))
        else:
            await self._reconcile()

    async def _reconcile(self) -> None:
        known = self._folder.seen
        changes = await self._board.preference_changes(max(known - 1, 0))
        if known == 0 or not changes:
            await self._restore()
        if changes and not self._folder.durable(changes[-1]):
            await self._in_thread(partial(self._folder.keep, changes))

    async def _restore(self) -> None:
        kept = await self._in_thread(self._folder.read_all)
        if kept.version and await self._board.restore_preferences(kept):
            metrics.PREFERENCES_RESTORED.inc()
            log.error("the board had lost its preferences, they are restored", version=kept.version, record=kept.seq)

    async def _guarded(self, call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
        except OSError as error:
            metrics.PREFERENCE_FOLDER_ERRORS.inc()
            if not self._refused:
                log.error(  # noqa: TRY400 - the disk's words say it
                    "changes of the preference are not kept in the run's folder: a loss of the store would lose them",
                    reason=str(error),
                )
            self._refused = True
        else:
            if self._refused:
                log.info("changes of the preference are kept in the run's folder again")
            self._refused = False
