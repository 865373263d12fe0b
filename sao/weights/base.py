"""The version store boundary: immutable weight versions, complete or invisible.

- A name is allocated once, by create-exclusive, and never again, also after a crash: names only rise.
- `commit` makes a version visible in one step, manifest last; before it, no reader sees any of it.
- A trainer epoch that has been overtaken commits nothing: a stopped trainer that wakes is refused.
- A version that somebody holds a lease on is not collected, nor is the newest.

tests/contract/test_version_store.py runs on every implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from sao.weights.checkpoint import sha256_of
from sao.weights.manifest import Manifest

Checksum = Callable[[Path], str]
"""Hex SHA-256 of a file."""


class VersionStoreError(Exception):
    """Base of what this boundary raises."""


class UnknownVersionError(VersionStoreError):
    """No complete version has this name."""


class IncompleteVersionError(VersionStoreError):
    """A version's files do not match its manifest; names the first that differs."""


class StaleWriterError(VersionStoreError):
    """A newer trainer epoch has already committed; says both."""


class NoSpaceError(VersionStoreError):
    """Not enough free space to write a version; says how much there is and how much is needed."""


class VersionStore(Protocol):
    def allocate(self) -> tuple[str, Path]:
        """A fresh version name and an empty private directory to write its files into."""

    def commit(self, manifest: Manifest, directory: Path) -> Path:
        """Publish the directory `allocate` gave for the manifest's version; the path readers use.

        Files are named and sized by the manifest; IncompleteVersionError when the directory holds others.
        """

    def names(self) -> list[str]:
        """Complete versions, oldest first."""

    def manifest(self, version: str) -> Manifest: ...

    def path(self, version: str) -> Path:
        """Where the version's files lie (absolute)."""

    def staged(self) -> list[Path]:
        """Directories of versions that are being written, for who reads ahead.

        Files in them may be unfinished, change and go at any time; they keep their identity when the version is
        committed.
        """

    def verify(self, version: str, checksum: Checksum = sha256_of) -> None:
        """Compare every file's checksum; IncompleteVersionError when one differs, is missing or is one too many.

        `checksum`: of one file, for a caller that has read it already.
        One too many matters: an engine loads every *.safetensors file it finds in the directory.
        """

    def lease(self, version: str, holder: str) -> None:
        """Keep the version while `holder` uses it (one version per holder; a new lease replaces the old)."""

    def release(self, holder: str) -> None:
        """Give the holder's lease back; nothing happens when it has none.

        In the contract because an engine that left the run would otherwise keep its version for ever.
        """

    def leases(self) -> dict[str, str]:
        """Version by holder."""

    def roll_back(self, announced: Collection[str]) -> list[str]:
        """Remove what interrupted publications have left: staged files, and unleased versions above all `announced`.

        For a writer that has fenced every earlier one, before its first `allocate`. Without anything announced no
        version goes: then it is the announcements that are lost. The names removed, never to be allocated again.
        """

    def collect(self, keep_last: int) -> list[str]:
        """Remove unleased versions but the newest `keep_last` (at least 1); the names removed."""
