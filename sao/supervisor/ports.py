"""Free TCP ports, chosen before anything starts."""

from __future__ import annotations

import random
import socket
from pathlib import Path

SPAN = 12000


class NoFreePortError(OSError):
    """No free port was found, or the one that was asked for is taken."""


class PortChooser:
    """Hands out free ports, none of them twice.

    They lie below the kernel's ephemeral range: between choosing one and a slow server binding it, an outgoing
    connection must not get it.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        top = low if low > 2048 else 32768
        self._candidates = list(range(max(1024, top - SPAN), top))
        random.SystemRandom().shuffle(self._candidates)
        self._given: set[int] = set()

    def free(self) -> int:
        """A port nobody listens on."""
        while self._candidates:
            port = self._candidates.pop()
            if port not in self._given and self._is_free(port):
                self._given.add(port)
                return port
        msg = f"no free port on {self._host}"
        raise NoFreePortError(msg)

    def take(self, asked: int, key: str) -> int:
        """The asked port, or a free one for 0; NoFreePortError names the key when it is taken."""
        if asked == 0:
            return self.free()
        if asked in self._given or not self._is_free(asked):
            msg = f"{key}: port {asked} on {self._host} is taken; name another, or 0 for any free one"
            raise NoFreePortError(msg)
        self._given.add(asked)
        return asked

    def _is_free(self, port: int) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._host, port))
            except OSError:
                return False
        return True
