"""Probes as the kubelet asks them, of real servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tools.images.engine import Engine
from tools.images.play import Container, Played, Probe
from tools.images.run import Stack

ONE = Container("pod-0", "one", False, 10001, 1, {}, (), 0)


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 503)
        self.send_header("content-length", "5")
        self.end_headers()
        self.wfile.write(b"stuck")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def running(tmp_path: Path) -> Stack:
    """A stack whose only pod is this machine."""
    pods = [Played("pod-0", "", (), {}, 30, (ONE,))]
    return Stack(Engine(tmp_path, tmp_path), pods, lambda _text: None, addresses={"pod-0": "127.0.0.1"})


def asked(kind: str, port: int, path: str = "") -> Probe:
    return Probe(kind, port, path, (), 1, 1, 1)


def test_a_probe_passes_where_the_server_says_that_it_is_well(running: Stack, port: int) -> None:
    assert running.ask(ONE, asked("http", port, "/healthz")) == ""
    assert running.ask(ONE, asked("tcp", port)) == ""


def test_a_probe_says_what_the_server_says_and_where_nobody_listens(running: Stack, port: int) -> None:
    assert running.ask(ONE, asked("http", port, "/readyz")) == "/readyz answered 503: stuck"
    assert "Connect" in running.ask(ONE, asked("http", 1, "/healthz"))
    assert "refused" in running.ask(ONE, asked("tcp", 1))


def test_a_pod_that_has_no_address_yet_is_not_well(running: Stack, port: int) -> None:
    running.addresses.clear()
    assert "no address yet" in running.ask(ONE, asked("tcp", port))
