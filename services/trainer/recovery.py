"""After a fall-back to an older checkpoint: find in the archive what that one lacks and the stream no longer has."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from sao.archive import Archive
from sao.outcome import OUTCOME, Scored
from sao.streams.base import TrajectoryStreams
from sao.telemetry.logs import get_logger
from sao.trajectory import Trajectory
from sao.v1 import archive_pb2 as pb
from services.trainer.checkpoint import Progress
from services.trainer.consumer import Archived
from services.trainer.outage import ride_out
from services.trainer.records import CRITIC_ONLY

log = get_logger(__name__)


async def lost_work(archive: Archive, progress: Progress, streams: TrajectoryStreams) -> list[Archived]:
    """Trajectories trained after `progress` whose stream entries are settled, in the order they were trained.

    After a plain crash there are none: what no checkpoint holds was not settled and is delivered again.
    """
    found: dict[str, Archived] = {}
    for step in _steps(archive, progress, after=True):
        for trained in step.trajectories:
            trajectory = Trajectory(trained.trajectory)
            if await ride_out(partial(streams.payload, trajectory.id)) is not None:
                continue
            outcome = OUTCOME.validate_json(trained.outcome_json)
            if isinstance(outcome, Scored):
                found[trajectory.id] = Archived(trajectory, outcome)
    if not found:
        return []
    for step in _steps(archive, progress, after=False):
        for trained in step.trajectories:
            found.pop(trained.trajectory.id, None)
    log.warning("training again what the restored checkpoint lacks", trajectories=len(found), update=progress.update)
    return list(found.values())


def _steps(archive: Archive, progress: Progress, *, after: bool) -> Iterator[pb.ArchivedUpdate]:
    held = (progress.update, progress.critic_only)
    for update in archive.updates():
        if update < progress.update if after else update > progress.update:
            continue
        for step in archive.read_steps(update):
            if ((step.update, int(step.metrics[CRITIC_ONLY])) > held) is after:
                yield step
