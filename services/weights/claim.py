"""Which weights service keeps the engines of a run: the one that started last, and no other.

A service claims the next epoch as it starts, above every one that board or run folder know of. Whatever an older one
tells the board from then on is refused, and it ends within seconds, with a message that names the newer one. What it
did to an engine meanwhile the newer one finds: it trusts nothing from before its start, and looks at each label every
second. Nothing has to be given back: a service that was killed leaves a number behind.

In the run folder a claim is an empty file named by its number: any number of services may start at the same time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from sao.atomic import fsync_directory
from sao.board.base import Board
from sao.streams.base import StreamUnavailableError
from sao.telemetry.logs import get_logger

log = get_logger(__name__)
EPOCHS_FOLDER = "weights-epochs"


def this_process() -> str:
    """Who claims, in words."""
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"{socket.gethostname()}, process {os.getpid()}, started {at}"


class Claim:
    """One service's; `epoch` is 0 before `take`."""

    def __init__(self, board: Board, folder: Path, *, owner: str) -> None:
        self._board = board
        self._folder = folder
        self._owner = owner
        self.epoch = 0

    async def take(self) -> None:
        """Fence every service that started before; StreamUnavailableError, OSError."""
        known = await asyncio.to_thread(self._known)
        self.epoch = await self._board.new_weights_epoch(self._owner, above=known)
        await asyncio.to_thread(self._note)
        log.info("keeps the engines from now on", epoch=self.epoch, owner=self._owner)

    def _known(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        return max((int(mark.name) for mark in self._folder.iterdir()), default=0)

    def _note(self) -> None:
        (self._folder / str(self.epoch)).touch()
        fsync_directory(self._folder)
        for mark in self._folder.iterdir():
            if int(mark.name) < self.epoch:
                mark.unlink(missing_ok=True)

    async def run(self, stop: asyncio.Event, every_s: float) -> None:
        """Say that this service still serves; FencedError ends it. A board that does not answer fences nobody."""
        while not stop.is_set():
            with suppress(StreamUnavailableError):  # the keepers say so
                await self._board.hold_weights_epoch(self.epoch, self._owner)
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await stop.wait()
