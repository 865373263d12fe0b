"""Is a process ready? One quick question, asked again on the next tick; never an exception."""

from __future__ import annotations

import socket
from collections.abc import Callable

import httpx

Probe = Callable[[], bool]

_client = httpx.Client(trust_env=False, timeout=1.0)
"""Proxies of the environment are for the network, not for this machine's own processes."""


def http_ok(url: str, token: str | None = None) -> Probe:
    """Whether GET answers 200 within a second."""

    def probe() -> bool:
        return http_text(url, token)[0] == httpx.codes.OK

    return probe


def http_text(url: str, token: str | None = None) -> tuple[int | None, str]:
    """Status and body, or None and what went wrong."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = _client.get(url, headers=headers)
    except httpx.HTTPError as error:
        return None, str(error) or type(error).__name__
    return answer.status_code, answer.text


def redis_ok(host: str, port: int) -> Probe:
    """Whether a PING gets PONG: not while the append-only file is still being read."""

    def probe() -> bool:
        try:
            with socket.create_connection((host, port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    return probe
