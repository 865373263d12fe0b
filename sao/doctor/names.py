"""Does the name server answer, over UDP and over TCP, and what does each name lead to.

A name server that is asked itself tells a closed connection from a name that nobody has; the system's resolver, which
is asked for the names, says the same to both, and speaks TCP only where an answer is too long for UDP.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import secrets
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sao.threads import DaemonThreads

RESOLV_CONF, HOSTS = Path("/etc/resolv.conf"), Path("/etc/hosts")
PORT = 53
PROTOCOLS = ("UDP", "TCP")
MAX_SERVERS = 3
"""As many as the C library asks."""
_HEADER = struct.Struct("!HHHHHH")
_RECURSION_DESIRED, _IS_ANSWER = 0x0100, 0x8000
_TYPE_A, _CLASS_IN = 1, 1


@dataclass(frozen=True, slots=True)
class Resolver:
    """What resolv.conf says."""

    servers: Sequence[str] = ()
    """Addresses."""
    search: Sequence[str] = ()
    """Domains, the first one tried first."""
    ndots: int = 1
    """A name with fewer dots is looked for in those domains first."""

    def first(self, name: str) -> str:
        """What the system asks first for this name; a server that serves it answers that without asking others."""
        searched = self.search and name.count(".") < self.ndots and not name.endswith(".")
        return f"{name}.{self.search[0]}" if searched else name


@dataclass(frozen=True, slots=True)
class Resolved:
    """One name was asked for."""

    name: str
    addresses: Sequence[str] = ()
    problem: str = ""
    """Why there are none."""


def resolver(text: str) -> Resolver:
    """What a resolv.conf says, of several `search` lines the last."""
    servers, search, ndots = [], list[str](), 1
    for line in text.splitlines():
        match line.split():
            case ["nameserver", address, *_]:
                servers.append(address)
            case ["search" | "domain", *domains]:
                search = domains
            case ["options", *options]:
                ndots = next((int(one[6:]) for one in options if re.fullmatch(r"ndots:\d+", one)), ndots)
    return Resolver(servers[:MAX_SERVERS], search, ndots)


def read(path: Path) -> str:
    """The file's text, nothing where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def asked_of_a_server(hosts: Iterable[str], hosts_file: str) -> list[str]:
    """Those that only a name server knows: no addresses, and not in /etc/hosts; each once, in order."""
    known = {word.lower() for line in hosts_file.splitlines() for word in line.partition("#")[0].split()[1:]}
    return [one for one in dict.fromkeys(hosts) if one and one.lower() not in known and not is_address(one)]


def is_address(host: str) -> bool:
    """Whether it is an address already."""
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def question(name: str, number: int) -> bytes:
    """A DNS message that asks for the IPv4 addresses of a name (RFC 1035, 4.1); ValueError for an impossible name."""
    labels = [label.encode("idna") for label in name.strip(".").split(".")]
    if not all(0 < len(label) < 64 for label in labels):
        msg = f"{name!r} is no name that DNS can hold: expected labels of 1 to 63 bytes"
        raise ValueError(msg)
    encoded = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return _HEADER.pack(number, _RECURSION_DESIRED, 1, 0, 0, 0) + encoded + struct.pack("!HH", _TYPE_A, _CLASS_IN)


def answers(message: bytes, number: int) -> bool:
    """Whether this is an answer to that question, whatever it says: a server that knows no such name answers too."""
    if len(message) < _HEADER.size:
        return False
    found, flags, *_ = _HEADER.unpack_from(message)
    return bool(found == number and flags & _IS_ANSWER)


async def ask(server: str, protocol: str, name: str, *, timeout_s: float, port: int = PORT) -> str:
    """Ask one name server over `UDP` or `TCP`; why it does not answer, empty when it does."""
    number = secrets.randbelow(2**16)
    try:
        message = question(name, number)
        async with asyncio.timeout(timeout_s):
            answer = await (_over_udp if protocol == "UDP" else _over_tcp)(server, port, message)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except (OSError, ValueError, EOFError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if answers(answer, number) else f"{len(answer)} bytes that are no answer to what was asked"


async def _over_udp(server: str, port: int, message: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    # As the library splits it: the address alone would lack the interface that `fe80::1%eth0` names.
    ((family, *_, address), *_) = socket.getaddrinfo(server, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.setblocking(False)
        asking.connect(address)  # so that a refusal (ICMP) is an error, and strangers are not heard
        await loop.sock_sendall(asking, message)
        return await loop.sock_recv(asking, 2**16)


async def _over_tcp(server: str, port: int, message: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(server, port)
    try:
        writer.write(struct.pack("!H", len(message)) + message)
        await writer.drain()
        (length,) = struct.unpack("!H", await reader.readexactly(2))
        return await reader.readexactly(length)
    finally:
        writer.close()


async def look_up(names: Sequence[str], *, timeout_s: float) -> list[Resolved]:
    """What the system's resolver says to each, all at once."""
    if not names:
        return []
    # Daemons: the C library goes on asking for longer than anybody here waits, and must not hold up the end.
    threads = DaemonThreads(len(names), name="doctor-names")
    return list(await asyncio.gather(*(_look_up(threads, name, timeout_s) for name in names)))


async def _look_up(threads: DaemonThreads, name: str, timeout_s: float) -> Resolved:
    try:
        async with asyncio.timeout(timeout_s):
            rows = await threads.run(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except TimeoutError:
        return Resolved(name, problem=f"no answer within {timeout_s:g} s")
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            return Resolved(name, problem=f"the name server could not say ({error.strerror})")
        return Resolved(name, problem=f"no such name ({error.strerror})")
    except (OSError, UnicodeError) as error:
        return Resolved(name, problem=f"{type(error).__name__}: {error}")
    return Resolved(name, sorted({str(row[4][0]) for row in rows}))
