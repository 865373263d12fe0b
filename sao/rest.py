"""The HTTP server of services with a REST interface: uvicorn without what a service must not have from it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol


class Server(uvicorn.Server):
    """Serves an ASGI application until `should_exit`; leaves signals to sao.process, and WebSockets alone."""

    def __init__(self, app: Any, *, grace_s: int) -> None:  # noqa: ANN401 - an ASGI application, as uvicorn takes it
        """`grace_s`: what requests in flight get at the end, in seconds."""
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=grace_s,
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """HTTP/1.1 whose answers are sent at once, and one to a client that breaks the framing of its request.

    uvicorn's own sends its 400 beside the one that the application is about to give; whichever comes second raises.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own type
        # asyncio turns Nagle's algorithm off only where a socket names its protocol, which those of
        # socket.create_server do not: an answer's body would wait for the client's delayed acknowledgement, 40 ms.
        if (accepted := transport.get_extra_info("socket")) is not None:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)

    def send_400_response(self, msg: str) -> None:
        request = self.cycle
        if request is None or request.response_complete:
            super().send_400_response(msg)
            return
        request.disconnected = True
        request.message_event.set()
        if request.response_started:
            self.transport.close()
        else:
            super().send_400_response(msg)
