"""Trajectories as files: those nobody will take any more (dead), and those that wait for ingest (spool)."""

from __future__ import annotations

import os
from pathlib import Path

from sao.v1 import ingest_pb2 as pb

_SUFFIX = ".pb"


class TrajectoryFolder:
    """One file a trajectory, named by its id: its whole `PublishRequest`, or nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, request: pb.PublishRequest, reason: str = "") -> Path:
        """Store it durably, with the reason in `<id>.txt` beside it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if reason:
            (self._folder / f"{request.trajectory.id}.txt").write_text(reason + "\n")
        path = self._folder / f"{request.trajectory.id}{_SUFFIX}"
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(request.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        return path

    def ids(self) -> list[str]:
        """Oldest first (the ids are UUIDv7)."""
        return sorted(path.stem for path in self._folder.glob(f"*{_SUFFIX}"))

    def get(self, trajectory_id: str) -> pb.PublishRequest:
        return pb.PublishRequest.FromString((self._folder / f"{trajectory_id}{_SUFFIX}").read_bytes())

    def remove(self, trajectory_id: str) -> None:
        (self._folder / f"{trajectory_id}{_SUFFIX}").unlink(missing_ok=True)
