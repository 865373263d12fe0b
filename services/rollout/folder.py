"""Trajectories as files: those nobody will take any more (dead), and those that ingest does not have yet (spool)."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import DecodeError

from sao.atomic import make_directory, write_file
from sao.v1 import ingest_pb2 as pb

SUFFIX = ".pb"


class DamagedFileError(ValueError):
    """A file that does not hold the trajectory that it is named after."""


class TrajectoryFolder:
    """One file a trajectory, named by its id: its whole `PublishRequest`, or nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, trajectory_id: str) -> Path:
        return self.path / f"{trajectory_id}{SUFFIX}"

    def put(self, request: pb.PublishRequest, reason: str = "") -> Path:
        """Store it, with the reason in `<id>.txt` beside it; durable on return."""
        make_directory(self.path)
        path = self.file(request.trajectory.id)
        if reason:
            write_file(path.with_suffix(".txt"), f"{reason}\n".encode())
        write_file(path, request.SerializeToString())
        return path

    def ids(self) -> list[str]:
        """Oldest first (the ids are UUIDv7)."""
        return sorted(path.stem for path in self.path.glob(f"*{SUFFIX}"))

    def get(self, trajectory_id: str) -> pb.PublishRequest:
        """The request that was put; DamagedFileError when the file holds something else."""
        path = self.file(trajectory_id)
        data = path.read_bytes()
        try:
            request = pb.PublishRequest.FromString(data)
        except DecodeError as error:
            msg = f"{path}: {len(data)} bytes that are no PublishRequest"
            raise DamagedFileError(msg) from error
        if request.trajectory.id != trajectory_id:
            msg = f"{path}: holds trajectory {request.trajectory.id!r}, expected the one it is named after"
            raise DamagedFileError(msg)
        return request

    def remove(self, trajectory_id: str) -> None:
        self.file(trajectory_id).unlink(missing_ok=True)
