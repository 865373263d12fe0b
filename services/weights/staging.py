"""What can be done for a round while the engine still serves: the version's files are whole, and in the page cache.

- Every file is read and its SHA-256 compared with the manifest's. That holds for the layout too: the version was
  inspected when it appeared (preflight.py), and the same bytes have the same layout.
- On the engine's own host these are the bytes that the engine reads next, and they stay in the page cache for it. For
  an engine on another host they are the store's: what that host reads, only checksums and canary prove, and its cache
  is cold, so there the pause holds the reading too.
- Once for a version, however many engines there are; again when a file was changed since, and for an engine on this
  host when that was longer ago than `warm_s`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from sao.weights.base import VersionStore
from services.weights import metrics

Signature = frozenset[tuple[str, int, int, int]]
"""Name, size, time of the last change and inode of every file."""

_KEPT = 8


def on_this_host(url: str) -> bool:
    """Whether an engine with this address reads its files here: a loopback address, or this host's own name."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in {"localhost", socket.gethostname()}


@dataclass(frozen=True)
class Staged:
    """A version whose files were read and found whole; `seconds` is what that took, for all engines together."""

    version: str
    signature: Signature
    at: float
    seconds: float


class Staging:
    """One for the fleet; keepers ask it before they ask for a slot."""

    def __init__(
        self, store: VersionStore, *, warm_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._warm_s = warm_s
        self._clock = clock
        self._staged: dict[str, Staged] = {}
        self._busy = asyncio.Lock()

    def signature(self, version: str) -> Signature:
        """What would change if somebody wrote to the version's files."""
        directory = self._store.path(version)
        stats = ((file.relative_to(directory).as_posix(), file.stat()) for file in directory.rglob("*"))
        return frozenset((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)

    def note(self, version: str, signature: Signature, seconds: float) -> Staged:
        """Somebody has read all of the version and found it whole; `signature` is from before that."""
        staged = Staged(version, signature, self._clock(), seconds)
        self._staged.pop(version, None)
        self._staged[version] = staged
        while len(self._staged) > _KEPT:
            del self._staged[next(iter(self._staged))]
        metrics.STAGING_SECONDS.observe(seconds)
        return staged

    async def stage(self, version: str, *, local: bool) -> Staged:
        """Read the version unless that was done; IncompleteVersionError when a file is not what the manifest says."""
        async with self._busy:
            signature = await asyncio.to_thread(self.signature, version)
            known = self._staged.get(version)
            fresh = known is not None and (not local or self._clock() - known.at <= self._warm_s)
            if known is not None and fresh and known.signature == signature:
                return known
            started = time.monotonic()
            await asyncio.to_thread(self._store.verify, version)
            return self.note(version, signature, time.monotonic() - started)
