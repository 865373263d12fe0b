"""A name that resolves to an address for each engine, as a headless service of Kubernetes does.

Such a service must publish addresses that are not ready (`publishNotReadyAddresses`): an engine answers no readiness
probe of SGLang's own while it is paused, and would seem to leave at every round. A name without any address is an
error here, not an empty fleet: a misspelt name and a name server that has just started say the same.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence

from sao.threads import DaemonThreads
from services.weights.discovery.base import DiscoveryError, Located

Resolve = Callable[[str, int], Sequence[str]]
"""Name and port to addresses; OSError when there is none."""


def system_addresses(name: str, port: int) -> Sequence[str]:
    """What the system's resolver says."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class DnsDiscovery:
    """`name:port`, asked anew at each look; one question at a time, so that a hanging resolver takes one thread."""

    def __init__(self, name: str, port: int, *, deadline_s: float, resolve: Resolve = system_addresses) -> None:
        self._name = name
        self._port = port
        self._deadline_s = deadline_s
        self._resolve = resolve
        self._threads = DaemonThreads(1, name="discovery")

    async def look(self) -> Sequence[Located]:
        try:
            async with asyncio.timeout(self._deadline_s):
                found = await self._threads.run(lambda: self._resolve(self._name, self._port))
            addresses = sorted({ipaddress.ip_address(address.partition("%")[0]) for address in found}, key=_order)
        except TimeoutError as error:
            msg = f"engine.dns: {self._name} was not resolved within {self._deadline_s:g} s"
            raise DiscoveryError(msg) from error
        except (OSError, ValueError) as error:
            msg = f"engine.dns: {self._name} gives no addresses: {error}; expected one for each engine"
            raise DiscoveryError(msg) from error
        if not addresses:
            msg = f"engine.dns: {self._name} resolves to nothing, expected an address for each engine"
            raise DiscoveryError(msg)
        return [self._located(address) for address in addresses]

    def _located(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> Located:
        host = f"[{address}]" if address.version == 6 else str(address)
        return Located(f"engine-{str(address).replace('.', '-').replace(':', '-')}", f"http://{host}:{self._port}")


def _order(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[int, int]:
    return address.version, int(address)
