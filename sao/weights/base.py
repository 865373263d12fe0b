"""The version store boundary: immutable weight versions, complete or invisible.

- A name is allocated once, by create-exclusive, and never again, also after a crash: names only rise.
- `commit` makes a version visible in one step, manifest last; before it, no reader sees any of it.
- A version that somebody holds a lease on is not collected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from sao.weights.manifest import Manifest


class VersionStoreError(Exception):
    """Base of what this boundary raises."""


class IncompleteVersionError(VersionStoreError):
    """A version's files do not match its manifest; names the first that differs."""


class NoSpaceError(VersionStoreError):
    """Not enough free space to write a version; says how much there is and how much is needed."""


class VersionStore(Protocol):
    def allocate(self) -> tuple[str, Path]:
        """A fresh version name and an empty private directory to write its files into."""

    def commit(self, manifest: Manifest, directory: Path) -> Path:
        """Publish the directory under the manifest's version; the path readers use."""

    def names(self) -> list[str]:
        """Complete versions, oldest first."""

    def manifest(self, version: str) -> Manifest: ...

    def path(self, version: str) -> Path:
        """Where the version's files lie."""

    def verify(self, version: str) -> None:
        """Recompute every file's checksum; IncompleteVersionError when one differs or is missing."""

    def lease(self, version: str, holder: str) -> None:
        """Keep the version while `holder` uses it (one version per holder; a new lease replaces the old)."""

    def collect(self, keep_last: int) -> list[str]:
        """Remove unleased versions but the newest `keep_last`; the names removed."""
