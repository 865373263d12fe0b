"""TCP proxies between the processes, so that the network can fail too: latency, reset, black hole.

    client ──▶ Link (own port) ──▶ target port         one asyncio loop in a thread serves every link

What comes from the target is shown to a watcher before it is passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any, TypeVar

LATENCY_S = 0.25
"""Added to each piece of data on its way, in both directions."""
_PIECE = 1 << 16
_RST_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with no time to linger: close sends RST, not FIN."""

T = TypeVar("T")
Watcher = Callable[[bytes], object]
"""Sees what the target sends on one connection; an exception of it ends the connection."""


class Mode(Enum):
    """How a link treats its connections."""

    PASS = "pass"
    LATENCY = "latency"
    RESET = "reset"
    """Every connection is reset, new ones at once."""
    BLACK_HOLE = "black hole"
    """Connections are accepted and nothing goes through; what was sent arrives when it is over."""


class Link:
    """One listening port in front of one target; only its loop touches it."""

    def __init__(self, target: tuple[str, int], watch: Callable[[], Watcher] | None) -> None:
        self._target = target
        self._watch = watch
        self._open = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.mode = Mode.PASS
        self.port = 0
        self._open.set()

    async def listen(self) -> None:
        """Start, on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def switch(self, mode: Mode) -> None:
        """Treat old and new connections this way from now on."""
        self.mode = mode
        if mode is Mode.BLACK_HOLE:
            self._open.clear()
        else:
            self._open.set()
        if mode is Mode.RESET:
            for writer in list(self._writers):
                _reset(writer)

    async def close(self) -> None:
        """End every connection and stop listening."""
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve it in a task of our own: asyncio of 3.11 calls one of its own that `close` cancels an error."""
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            if self.mode is not Mode.RESET:
                there, back = await asyncio.open_connection(*self._target)
                writers.append(back)
                self._writers.update(writers)
                async with asyncio.TaskGroup() as group:
                    watcher = self._watch() if self._watch is not None else None
                    group.create_task(self._pump(reader, back, None))
                    group.create_task(self._pump(there, writer, watcher))
                for one in writers:
                    one.close()
        except* OSError:
            pass  # one side has gone: the other is told below
        finally:
            self._writers.difference_update(writers)
            for one in writers:
                if not one.is_closing():
                    _reset(one)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, watcher: Watcher | None) -> None:
        while data := await reader.read(_PIECE):
            if watcher is not None:
                watcher(data)
            if self.mode is Mode.LATENCY:
                await asyncio.sleep(LATENCY_S)
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        writer.write_eof()


class Proxies:
    """Every link, in a thread of its own; methods are called from outside of it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        self._links: list[Link] = []
        self.errors: list[str] = []
        """What went wrong in the proxies themselves; a ledger that was kept meanwhile proves nothing."""
        self._loop.set_exception_handler(lambda _loop, context: self.errors.append(str(context)))

    def link(self, target_port: int, watch: Callable[[], Watcher] | None = None) -> Link:
        """A new link to a port of this machine; `watch` makes the watcher of each connection."""

        async def make() -> Link:
            link = Link(("127.0.0.1", target_port), watch)
            await link.listen()
            return link

        link = self._run(make())
        self._links.append(link)
        return link

    def switch(self, link: Link, mode: Mode) -> None:
        """Put a link into a mode."""
        self._run(link.switch(mode))

    def close(self) -> None:
        """End every link and the thread."""
        for link in self._links:
            self._run(link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):  # closed by now
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
    writer.transport.abort()
