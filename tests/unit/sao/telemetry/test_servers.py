"""The same answers from both servers, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter

from sao.telemetry.asgi import telemetry_asgi
from sao.telemetry.health import Health
from sao.telemetry.http import CONNECTIONS, TelemetryServer
from tests.support.processes import wait_until


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(5.0, clock)


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("sao_test_things_total", "Things.", registry=registry).inc(3)
    return registry


@pytest.fixture
def stdlib_port(health: Health, registry: CollectorRegistry) -> Iterator[int]:
    server = TelemetryServer(health, "127.0.0.1", 0, registry)
    yield server.start()
    server.close()


@pytest.fixture
def asgi_port(health: Health, registry: CollectorRegistry) -> Iterator[int]:
    app = FastAPI()

    @app.get("/v1/own")
    def own() -> str:
        return "own"

    app.mount("/", telemetry_asgi(health, registry))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        wait_until(lambda: server.started, timeout_s=20, what="uvicorn to start")
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(10)


@pytest.fixture(params=["stdlib_port", "asgi_port"])
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    port = request.getfixturevalue(request.param)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5) as client:
        yield client


def test_metrics_are_in_the_text_format(client: httpx.Client) -> None:
    response = client.get("/metrics?name=anything")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "sao_test_things_total 3.0" in response.text.splitlines()


def test_healthz_fails_when_work_stands_still_although_the_server_answers(
    client: httpx.Client, health: Health, clock: Clock
) -> None:
    assert client.get("/healthz").status_code == 200
    health.working("update 7")
    clock.now += 6
    response = client.get("/healthz")
    assert response.status_code == 503
    assert "update 7" in response.text
    health.progress()
    assert client.get("/healthz").status_code == 200


def test_readyz_says_what_it_is_told(client: httpx.Client, health: Health) -> None:
    assert client.get("/readyz").status_code == 503
    health.set_ready(True)
    assert (client.get("/readyz").status_code, client.get("/readyz").text) == (200, "ready\n")


def test_head_has_no_body_and_other_paths_are_not_found(client: httpx.Client) -> None:
    head = client.head("/metrics")
    assert (head.status_code, head.content) == (200, b"")
    assert client.get("/secrets").status_code == 404


def test_writing_is_refused(client: httpx.Client) -> None:
    assert client.post("/healthz").status_code in {405, 501}


def test_own_routes_come_before_the_mounted_ones(asgi_port: int) -> None:
    assert httpx.get(f"http://127.0.0.1:{asgi_port}/v1/own", timeout=5).json() == "own"


def test_a_port_that_is_taken_is_named(stdlib_port: int, health: Health) -> None:
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{stdlib_port}.*choose another port"):
        TelemetryServer(health, "127.0.0.1", stdlib_port).start()


def test_close_frees_the_port_and_may_be_repeated(health: Health) -> None:
    server = TelemetryServer(health, "127.0.0.1", 0)
    port = server.start()
    server.close()
    server.close()
    again = TelemetryServer(health, "127.0.0.1", port)
    assert again.start() == port
    again.close()


def test_starting_twice_is_a_mistake(health: Health) -> None:
    server = TelemetryServer(health, "127.0.0.1", 0)
    server.start()
    with pytest.raises(RuntimeError, match="already"):
        server.start()
    server.close()


def test_silent_clients_cannot_take_every_thread(stdlib_port: int) -> None:
    before = threading.active_count()
    crowd = [socket.create_connection(("127.0.0.1", stdlib_port), timeout=30) for _ in range(3 * CONNECTIONS)]
    try:
        turned_away = [connection for connection in crowd[CONNECTIONS:] if connection.recv(1) == b""]
        assert len(turned_away) == 2 * CONNECTIONS
        assert threading.active_count() <= before + CONNECTIONS
    finally:
        for connection in crowd:
            connection.close()
    wait_until(lambda: answers(stdlib_port), timeout_s=10, what="the server to be free again")


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
