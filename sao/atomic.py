"""Files and directories that appear whole or not at all, and are still there after the power has failed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"
"""Ends the hidden name under which `write_file` builds a file; readers skip such names."""


def write_file(path: Path, data: bytes) -> None:
    """Make `path` hold `data`, replacing what was there in one step; durable on return.

    The bytes first lie under `.<name>.tmp` in the same directory, so one writer at a time per path. OSError leaves
    `path` as it was and nothing beside it.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def append_line(path: Path, line: bytes) -> None:
    """Add one line, after cutting off what a crash left of the last one; not durable when the machine crashes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.truncate(path.read_bytes().rfind(b"\n") + 1)
        file.write(line + b"\n")


def publish_directory(source: Path, target: Path) -> None:
    """Rename the finished directory `source` to `target`, its whole content made durable first.

    Both lie on one file system. FileExistsError when `target` exists: what is published is never replaced.
    """
    if target.exists():
        msg = f"{target} exists already; a published directory is never replaced"
        raise FileExistsError(msg)
    for folder, _, names in os.walk(source):
        for name in names:
            _fsync(Path(folder) / name, os.O_RDONLY)
        fsync_directory(Path(folder))
    source.rename(target)
    fsync_directory(target.parent)
    if source.parent != target.parent:
        fsync_directory(source.parent)


def make_directory(path: Path) -> None:
    """Make a directory and its parents, where they are missing; durable on return."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        fsync_directory(made.parent)


def fsync_file(path: Path) -> None:
    """Make what a file holds durable."""
    _fsync(path, os.O_RDONLY)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
