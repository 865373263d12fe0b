"""A real HTTP/1.1 server on loopback that can also do what a broken endpoint does: cut a connection, never answer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

MAX_BODY = 1 << 24


@dataclass(frozen=True)
class Asked:
    """One request."""

    path: str
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes


@dataclass(frozen=True)
class Reply:
    """One answer."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class Breakage(Enum):
    """Instead of an answer."""

    RESET = "reset"
    HANG = "hang"
    """Until the client hangs up."""


Handler = Callable[[Asked], Awaitable[Reply | Breakage]]


class LoopbackServer:
    """`async with LoopbackServer(handler) as server:` listens at `server.url`."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._open: set[asyncio.Task[None]] = set()
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether the connection goes on."""
        found = await self._handler(await _read(reader))
        match found:
            case Breakage.RESET:
                linger = struct.pack("ii", 1, 0)  # closing then sends RST
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return False
            case Breakage.HANG:
                await reader.read()
                return False
            case Reply(status, body, headers):
                lines = {"Content-Type": "application/json", **headers, "Content-Length": str(len(body))}
                head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
                writer.write(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body)
                await writer.drain()
                return True


async def _read(reader: asyncio.StreamReader) -> Asked:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(min(int(headers.get("content-length", "0")), MAX_BODY))
    return Asked(first.split(" ")[1], headers, body)


# --- the judge -------------------------------------------------------------------------------------------------


class Fate(Enum):
    """What becomes of one call."""

    HONEST = "scored"
    RESET = "reset"
    ERROR = "error"
    GARBAGE = "garbage"
    SLOW = "slow"

    @property
    def kind(self) -> str:
        """The outcome that the reward service must make of it."""
        return {Fate.HONEST: "scored", Fate.SLOW: "timeout"}.get(self, "infra_failed")


@dataclass(frozen=True)
class Call:
    """One call that was made."""

    trajectory_id: str
    fate: Fate
    at_s: float
    """On the monotonic clock."""


def completion(scores: Mapping[str, object]) -> dict[str, Any]:
    """A chat completion that says so."""
    message = {"role": "assistant", "content": json.dumps(scores)}
    return {"object": "chat.completion", "choices": [{"index": 0, "finish_reason": "stop", "message": message}]}


class UnreliableJudge:
    """Fails a share of its calls (half cut off, a quarter each 500 and garbage) and never answers another share.

    Which ones is decided by a hash of the seed, the trajectory's id and how often it was asked about.
    """

    def __init__(self, component: str, *, seed: int, fail: float, slow: float) -> None:
        self._component = component
        self._seed = seed
        self._fail = fail
        self._slow = slow
        self._attempts: Counter[str] = Counter()
        self.calls: list[Call] = []

    async def __call__(self, asked: Asked) -> Reply | Breakage:
        trajectory_id = asked.headers["x-request-id"]
        self._attempts[trajectory_id] += 1
        fate = self.fate(trajectory_id, self._attempts[trajectory_id])
        self.calls.append(Call(trajectory_id, fate, time.monotonic()))
        match fate:
            case Fate.RESET:
                return Breakage.RESET
            case Fate.SLOW:
                return Breakage.HANG
            case Fate.ERROR:
                return Reply(500, b'{"error": "out of memory"}')
            case Fate.GARBAGE:
                return Reply(body=b'{"choices": [{"message": {"content": "{\\"hum')
            case Fate.HONEST:
                return Reply(body=json.dumps(completion({self._component: self.honest(trajectory_id)})).encode())

    def fate(self, trajectory_id: str, attempt: int) -> Fate:
        """What becomes of this call; attempts count from 1."""
        draw = _uniform(f"{self._seed}/{trajectory_id}/{attempt}")
        for share, fate in ((0.5, Fate.RESET), (0.75, Fate.ERROR), (1.0, Fate.GARBAGE)):
            if draw < share * self._fail:
                return fate
        return Fate.SLOW if draw < self._fail + self._slow else Fate.HONEST

    def honest(self, trajectory_id: str) -> float:
        """The score that it gives when it gives one: 0.2 to 1, never 0."""
        return round(0.2 + 0.8 * _uniform(f"{self._seed}/{trajectory_id}"), 6)


def _uniform(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
