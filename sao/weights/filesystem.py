"""Weight versions as directories under one root, on a file system that trainer and engines share.

| path under the root | what |
|---|---|
| `names/vNNNNNNNN` | empty marker: the name is taken, for ever |
| `staging/vNNNNNNNN/` | a version being written; no reader looks here |
| `vNNNNNNNN/` | a complete version: renamed from staging after its manifest.json |
| `leases/HOLDER` | the version this holder uses |
| `trash/` | collected versions on their way out |
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from sao.weights.base import (
    Checksum,
    IncompleteVersionError,
    NoSpaceError,
    StaleWriterError,
    UnknownVersionError,
    VersionStoreError,
)
from sao.weights.checkpoint import MANIFEST_FILE, sha256_of
from sao.weights.manifest import Manifest

_NAME = re.compile(r"v[0-9]{8}")
_HOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LOCK_DEADLINE_S = 10.0


def check_files(version: str, manifest: Manifest, directory: Path, checksum: Checksum | None) -> None:
    """Compare a directory with its manifest, also by `checksum`; IncompleteVersionError names the first difference."""
    expected = {entry.name: entry for entry in manifest.files}
    found = {file.relative_to(directory).as_posix(): file for file in directory.rglob("*") if file.is_file()}
    found.pop(MANIFEST_FILE, None)
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            msg = f"version {version}: {name} is missing in {directory}"
            raise IncompleteVersionError(msg)
        if name not in expected:
            msg = f"version {version}: {name} is in {directory} but not in the manifest"
            raise IncompleteVersionError(msg)
        size = found[name].stat().st_size
        if size != expected[name].size:
            msg = f"version {version}: {name} has {size} bytes, the manifest says {expected[name].size}"
            raise IncompleteVersionError(msg)
        if checksum is not None and (digest := checksum(found[name])) != expected[name].sha256:
            msg = f"version {version}: {name} has sha256 {digest}, the manifest says {expected[name].sha256}"
            raise IncompleteVersionError(msg)


@lru_cache(maxsize=16)
def _parse_manifest(file: Path, _mtime_ns: int) -> Manifest:
    return Manifest.model_validate_json(file.read_bytes())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(file: Path, data: bytes) -> None:
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
    _sync(file.parent)


class FileSystemVersionStore:
    """A VersionStore for any number of processes; `min_free_bytes` must be free before a version is begun.

    A staging directory untouched for `abandoned_after_s` belongs to a writer that died; `collect` removes it, as does
    `roll_back` at the next start.
    """

    def __init__(self, root: Path, min_free_bytes: int, *, abandoned_after_s: float = 3600.0) -> None:
        self._root = root.resolve()
        self._min_free_bytes = min_free_bytes
        self._abandoned_after_s = abandoned_after_s
        self._last_number = 0
        for folder in ("names", "staging", "leases", "trash"):
            (self._root / folder).mkdir(parents=True, exist_ok=True)

    def allocate(self) -> tuple[str, Path]:
        free = shutil.disk_usage(self._root).free
        if free < self._min_free_bytes:
            msg = f"{self._root} has {free} bytes free, a new version needs {self._min_free_bytes}: free some space"
            raise NoSpaceError(msg)
        name = self._take_name()
        directory = self._root / "staging" / name
        directory.mkdir()
        return name, directory

    def _take_name(self) -> str:
        """Markers have no gaps and stay, so trying upwards from any number below the highest finds the next free."""
        if self._last_number == 0:
            self._last_number = max((int(marker.name[1:]) for marker in (self._root / "names").iterdir()), default=0)
        number = self._last_number
        while True:
            number += 1
            name = f"v{number:08d}"
            try:
                (self._root / "names" / name).touch(exist_ok=False)
            except FileExistsError:
                continue
            _sync(self._root / "names")
            self._last_number = number
            return name

    def commit(self, manifest: Manifest, directory: Path) -> Path:
        version = manifest.version
        staging, final = self._root / "staging" / version, self._root / version
        if final.exists():
            msg = f"version {version} is committed already; allocate a new name"
            raise VersionStoreError(msg)
        if directory.resolve() != staging or not staging.is_dir():
            msg = f"version {version}: commit the directory that allocate gave, {staging}, not {directory}"
            raise VersionStoreError(msg)
        check_files(version, manifest, staging, checksum=None)
        for entry in manifest.files:
            _sync(staging / entry.name)
        _write_synced(staging / MANIFEST_FILE, manifest.model_dump_json(indent=1).encode())
        with self._locked():
            self._refuse_overtaken(manifest)
            staging.rename(final)
        _sync(self._root)
        return final

    def _refuse_overtaken(self, manifest: Manifest) -> None:
        newest = self.names()[-1:]
        epoch = self.manifest(newest[0]).trainer_epoch if newest else manifest.trainer_epoch
        if epoch > manifest.trainer_epoch:
            msg = (
                f"version {manifest.version} is of trainer epoch {manifest.trainer_epoch}, but {newest[0]} "
                f"was committed by epoch {epoch}: this trainer has been replaced and must stop"
            )
            raise StaleWriterError(msg)

    def names(self) -> list[str]:
        return sorted(
            entry.name
            for entry in self._root.iterdir()
            if _NAME.fullmatch(entry.name) and (entry / MANIFEST_FILE).is_file()
        )

    def manifest(self, version: str) -> Manifest:
        file = self.path(version) / MANIFEST_FILE
        try:
            return _parse_manifest(file, file.stat().st_mtime_ns)
        except (ValidationError, OSError) as error:
            msg = f"version {version}: {file} cannot be read: {error}"
            raise IncompleteVersionError(msg) from error

    def path(self, version: str) -> Path:
        directory = self._root / version
        if not _NAME.fullmatch(version) or not (directory / MANIFEST_FILE).is_file():
            msg = f"no complete version {version!r} in {self._root}"
            raise UnknownVersionError(msg)
        return directory

    def staged(self) -> list[Path]:
        return sorted(entry for entry in (self._root / "staging").iterdir() if entry.is_dir())

    def verify(self, version: str, checksum: Checksum = sha256_of) -> None:
        check_files(version, self.manifest(version), self.path(version), checksum)

    def lease(self, version: str, holder: str) -> None:
        file = self._lease_file(holder)
        with self._locked():
            self.path(version)
            _write_synced(file, version.encode())

    def release(self, holder: str) -> None:
        self._lease_file(holder).unlink(missing_ok=True)

    def leases(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for file in sorted((self._root / "leases").iterdir()):
            if _HOLDER.fullmatch(file.name):
                try:
                    found[file.name] = file.read_text()
                except FileNotFoundError:  # released between the listing and the reading
                    continue
        return found

    def roll_back(self, announced: Collection[str]) -> list[str]:
        with self._locked():
            held = set(self.leases().values())
            newest = max(announced, default="")
            removed = [name for name in self.names() if announced and name > newest and name not in held]
            for name in removed:
                self._discard(self._root / name)
            for staging in sorted((self._root / "staging").iterdir()):
                removed.append(staging.name)
                self._discard(staging)
        self._empty_trash()
        return removed

    def collect(self, keep_last: int) -> list[str]:
        if keep_last < 1:
            msg = f"keep_last is {keep_last}; the newest version is never collected, so at least 1"
            raise ValueError(msg)
        with self._locked():
            held = set(self.leases().values())
            removed = [name for name in self.names()[:-keep_last] if name not in held]
            for name in removed:
                self._discard(self._root / name)
            for staging in (self._root / "staging").iterdir():
                if time.time() - staging.stat().st_mtime > self._abandoned_after_s:
                    self._discard(staging)
        self._empty_trash()
        return removed

    def _discard(self, directory: Path) -> None:
        directory.rename(self._root / "trash" / f"{directory.name}-{uuid.uuid4().hex}")

    def _empty_trash(self) -> None:
        for entry in (self._root / "trash").iterdir():
            shutil.rmtree(entry, ignore_errors=True)

    def _lease_file(self, holder: str) -> Path:
        if not _HOLDER.fullmatch(holder):
            msg = f"lease holder {holder!r} is not a plain name (letters, digits, '.', '_', '-')"
            raise ValueError(msg)
        return self._root / "leases" / holder

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time, for steps that look before they rename; released by the kernel if we die."""
        deadline = time.monotonic() + _LOCK_DEADLINE_S
        with (self._root / ".lock").open("a") as stream:
            while True:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        msg = f"{self._root / '.lock'} has been held for {_LOCK_DEADLINE_S} s by another process"
                        raise VersionStoreError(msg) from error
                    time.sleep(0.002)
                else:
                    break
            yield
