"""The REST server against clients that break HTTP: one answer, and never a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import pytest

from sao.rest import Server
from tests.support.scored_tasks import until

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

REQUEST = b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
NO_CHUNK = b"zz\r\n"


async def read_then_answer(scope: Message, receive: Receive, send: Send) -> None:
    """Reads until the body ends or the client is gone, then answers all the same."""
    while (await receive()).get("more_body"):
        pass
    await answer(send)


async def answer_unread(scope: Message, receive: Receive, send: Send) -> None:
    """Answers without a look at the body."""
    await answer(send)


async def answer_at_once(scope: Message, receive: Receive, send: Send) -> None:
    """Sends half an answer before it reads, and the rest when the body ends or the client is gone."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"ha", "more_body": True})
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.body", "body": b"lf"})


async def answer(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[int]:
    server = Server(app, grace_s=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        await task


async def exchange(port: int, *parts: bytes) -> bytes:
    """Write the parts, reading a little between them; everything that was answered until the server hung up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = b""
    for part in parts:
        writer.write(part)
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            found += await asyncio.wait_for(reader.read(1000), 0.1)
    found += await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return found


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("app", [read_then_answer, answer_unread])
async def test_a_chunk_that_is_none_gets_one_400(app: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(app) as port:
        answered = await exchange(port, REQUEST + NO_CHUNK)
    assert answered.count(b"HTTP/1.1") == 1
    assert answered.startswith(b"HTTP/1.1 400 ")
    assert complaints(caplog) == []


async def test_behind_half_an_answer_there_is_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(answer_at_once) as port:
        answered = await exchange(port, REQUEST, NO_CHUNK)
    assert answered.startswith(b"HTTP/1.1 200 ")
    assert answered.endswith(b"\r\n\r\nha")
    assert complaints(caplog) == []


async def test_a_request_that_is_none_gets_a_400(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(read_then_answer) as port:
        assert (await exchange(port, b"\xff\xfe\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    assert complaints(caplog) == []


async def test_an_upgrade_to_a_websocket_is_an_ordinary_request(caplog: pytest.LogCaptureFixture) -> None:
    headers = "Host: x", "Upgrade: websocket", "Connection: Upgrade, close", "Sec-WebSocket-Version: 13"
    request = "\r\n".join(["GET / HTTP/1.1", *headers, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "", ""])
    async with serving(read_then_answer) as port:
        answered = await exchange(port, request.encode())
    assert answered.startswith(b"HTTP/1.1 200 ")
    assert complaints(caplog) == []


async def test_answers_are_sent_at_once_whatever_made_the_listening_socket() -> None:
    server = Server(answer_unread, grace_s=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        _, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
        await until(lambda: bool(server.server_state.connections), "the connection to be accepted")
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        server.should_exit = True
        await task
