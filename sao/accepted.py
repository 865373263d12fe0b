"""What ingest has accepted, written down beside the store: if the store loses its file, this names what was in it.

    <run.dir>/accepted/<process>.txt      one line a trajectory: `<id> <slot>`

Written after the append and before the worker is told, so every trajectory that a worker has let go of is here. A line
reaches the kernel, not the disk: it outlives the process, and a machine that fails may lose the last seconds of it, as
the store may. About fifty bytes a trajectory; nothing prunes it, it is small beside the archive.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

FOLDER = "accepted"
LOST_FILE = "lost.jsonl"
"""In the run's folder: one line for each of these that the store has lost, written by the trainer's start."""


class AcceptedLog:
    """The writing end, one file per process; opens it at the first line."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FOLDER / f"{uuid.uuid4().hex}.txt"
        self._descriptor: int | None = None
        self._torn = False

    def note(self, trajectory_id: str, slot: int) -> None:
        """Add one line in one write; OSError when the disk refuses, and a later call may succeed."""
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # What is torn ends with what no slot ends with, so that the reader leaves it out, half a number too.
        line = f"{_TORN if self._torn else ''}{trajectory_id} {slot}\n".encode()
        written = os.write(self._descriptor, line)
        self._torn = written < len(line)
        if self._torn:
            msg = f"{self._path}: {written} of {len(line)} bytes of a line were written: is the disk full?"
            raise OSError(msg)

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def accepted(run_dir: Path) -> Iterator[tuple[str, int]]:
    """(trajectory id, slot) of every whole line of every process, in no particular order; some come twice."""
    for path in sorted((run_dir / FOLDER).glob("*.txt")):
        with path.open(encoding="ascii", errors="replace") as file:
            for line in file:
                trajectory_id, _, slot = line.rstrip("\n").partition(" ")
                if line.endswith("\n") and len(trajectory_id) == _ID_LENGTH and slot.isdigit():
                    yield trajectory_id, int(slot)


_TORN = "?\n"
_ID_LENGTH = len(str(uuid.UUID(int=0)))
