"""In-memory twin of the version store: bookkeeping in this process, the files in a temporary directory."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Collection
from pathlib import Path

from sao.weights.base import (
    Checksum,
    IncompleteVersionError,
    NoSpaceError,
    StaleWriterError,
    UnknownVersionError,
    VersionStoreError,
)
from sao.weights.checkpoint import sha256_of
from sao.weights.filesystem import check_files
from sao.weights.manifest import Manifest


class MemoryVersionStore:
    """A VersionStore for one process; `free_bytes` imitates a file system of that much space."""

    def __init__(self, *, min_free_bytes: int = 0, free_bytes: int = 1 << 40) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sao-versions-")
        self._min_free_bytes = min_free_bytes
        self._free_bytes = free_bytes
        self._lock = threading.RLock()
        self._allocated: dict[str, Path] = {}
        self._committed: dict[str, Manifest] = {}
        self._leases: dict[str, str] = {}

    def allocate(self) -> tuple[str, Path]:
        if self._free_bytes < self._min_free_bytes:
            msg = f"{self._free_bytes} bytes free, a new version needs {self._min_free_bytes}: free some space"
            raise NoSpaceError(msg)
        with self._lock:
            name = f"v{len(self._allocated) + 1:08d}"
            directory = Path(self._folder.name).resolve() / name
            self._allocated[name] = directory
        directory.mkdir()
        return name, directory

    def commit(self, manifest: Manifest, directory: Path) -> Path:
        version = manifest.version
        with self._lock:
            if version in self._committed or self._allocated.get(version) != directory.resolve():
                msg = f"version {version}: {directory} was not allocated for it, or it is committed already"
                raise VersionStoreError(msg)
            check_files(version, manifest, directory, checksum=None)
            newest = self.names()[-1:]
            if newest and self._committed[newest[0]].trainer_epoch > manifest.trainer_epoch:
                msg = f"version {version}: trainer epoch {manifest.trainer_epoch} was overtaken by that of {newest[0]}"
                raise StaleWriterError(msg)
            self._committed[version] = manifest
        return directory

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._committed)

    def manifest(self, version: str) -> Manifest:
        with self._lock:
            if version not in self._committed:
                msg = f"no complete version {version!r}"
                raise UnknownVersionError(msg)
            return self._committed[version]

    def path(self, version: str) -> Path:
        self.manifest(version)
        return self._allocated[version]

    def staged(self) -> list[Path]:
        with self._lock:
            return [
                directory
                for name, directory in self._allocated.items()
                if name not in self._committed and directory.is_dir()
            ]

    def verify(self, version: str, checksum: Checksum = sha256_of) -> None:
        manifest = self.manifest(version)
        if not self.path(version).is_dir():
            msg = f"version {version}: its directory is gone"
            raise IncompleteVersionError(msg)
        check_files(version, manifest, self.path(version), checksum)

    def lease(self, version: str, holder: str) -> None:
        with self._lock:
            self.manifest(version)
            self._leases[holder] = version

    def release(self, holder: str) -> None:
        with self._lock:
            self._leases.pop(holder, None)

    def leases(self) -> dict[str, str]:
        with self._lock:
            return dict(self._leases)

    def roll_back(self, announced: Collection[str]) -> list[str]:
        with self._lock:
            held = set(self._leases.values())
            newest = max(announced, default="")
            removed = [name for name in self.names() if announced and name > newest and name not in held]
            for name in removed:
                del self._committed[name]
                shutil.rmtree(self._allocated[name])
            staged = [
                name
                for name, directory in self._allocated.items()
                if name not in self._committed and directory.is_dir()
            ]
            for name in staged:
                shutil.rmtree(self._allocated[name])
        return removed + staged

    def collect(self, keep_last: int) -> list[str]:
        if keep_last < 1:
            msg = f"keep_last is {keep_last}; the newest version is never collected, so at least 1"
            raise ValueError(msg)
        with self._lock:
            held = set(self._leases.values())
            removed = [name for name in self.names()[:-keep_last] if name not in held]
            for name in removed:
                del self._committed[name]
                shutil.rmtree(self._allocated[name])
        return removed
