"""The newest archived trajectories with their components, read while the trainer writes and prunes the archive."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import DecodeError
from pydantic import ValidationError

from sao.archive import Archive, ArchiveError
from sao.outcome import OUTCOME, Scored
from sao.telemetry.logs import get_logger
from sao.v1 import archive_pb2 as pb
from services.reward.preferences.dry_run import Archived

log = get_logger(__name__)


def newest_archived(directory: Path, count: int) -> tuple[list[Archived], int]:
    """At most `count` trajectories, newest first, each once; and how many updates could not be read.

    Nothing when there is no archive yet. Blocks: for a thread.
    """
    if not directory.is_dir():
        return [], 0
    archive, found, unreadable = Archive(directory), dict[str, Archived](), 0
    for step in reversed(archive.steps()):
        try:
            update = archive.load(step)
            for one in update.trajectories:
                _take(found, update, one)
        except FileNotFoundError:
            continue  # pruned since it was listed
        except (ArchiveError, DecodeError, ValidationError, OSError) as error:
            log.warning("an archived update could not be read", file=step.file_name, error=str(error))
            unreadable += 1
        if len(found) >= count:
            break
    return list(found.values())[:count], unreadable


def _take(found: dict[str, Archived], update: pb.ArchivedUpdate, one: pb.TrainedTrajectory) -> None:
    outcome = OUTCOME.validate_json(one.outcome_json)
    name = one.trajectory.id
    if isinstance(outcome, Scored) and name not in found:  # one trained again after a fall-back is in both steps
        found[name] = Archived(name, update.update, outcome.components, outcome.judged)
