"""/metrics, /healthz and /readyz from a daemon thread, for processes that serve no HTTP of their own.

It shares nothing with the event loop: a process whose loop hangs still answers, and the answer says that it hangs.
"""

from __future__ import annotations

import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import REGISTRY, CollectorRegistry

from sao.telemetry.health import Health
from sao.telemetry.routes import answer

CONNECTIONS = 16
"""Connections served at a time; more are closed at once, so that clients cannot exhaust the process's threads."""
CLIENT_TIMEOUT_S = 5.0
"""Longest wait for one read from, or write to, a client."""


class TelemetryServer:
    """Serves the process's telemetry on `bind`:`port` (0: a free port) from `start` until `close`."""

    def __init__(self, health: Health, bind: str, port: int, registry: CollectorRegistry = REGISTRY) -> None:
        self._health = health
        self._address = (bind, port)
        self._registry = registry
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Listen; the bound port. OSError says which address cannot be had."""
        if self._server is not None:
            msg = "the telemetry server is already started"
            raise RuntimeError(msg)
        try:
            self._server = _Server(self._address, _handler(self._health, self._registry))
        except OSError as error:
            host, port = self._address
            msg = f"cannot serve telemetry on {host}:{port}: {error.strerror or error}; choose another port"
            raise OSError(error.errno, msg) from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="telemetry", daemon=True)
        self._thread.start()
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening; may be called twice, or without `start`."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(CLIENT_TIMEOUT_S)
            self._server = self._thread = None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._slots = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(address, handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no event of ours; anything else is."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def process_request(  # type: ignore[override]
        self, request: socket.socket, client_address: tuple[str, int]
    ) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(  # type: ignore[override]
        self, request: socket.socket, client_address: tuple[str, int]
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()


def _handler(health: Health, registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            self._send(with_body=True)

        def do_HEAD(self) -> None:
            self._send(with_body=False)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Scrapes and probes are not events."""

        def _send(self, *, with_body: bool) -> None:
            reply = answer(self.path, health, registry)
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            if with_body:
                self.wfile.write(reply.body)

    return Handler
