"""What a restored trainer needs of the archive: the work its checkpoint lacks, and what was measured lately.

The same update may have been made in several epochs, of which every fall-back to an older checkpoint has abandoned
one; `Progress.holds` tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from sao.archive import Archive, StepName
from sao.outcome import OUTCOME, Scored
from sao.rows import CRITIC_ONLY
from sao.streams.base import TrajectoryStreams
from sao.telemetry.logs import get_logger
from sao.trajectory import Trajectory
from services.trainer.checkpoint import Progress
from services.trainer.consumer import Archived
from services.trainer.outage import ride_out

log = get_logger(__name__)


async def lost_work(archive: Archive, progress: Progress, streams: TrajectoryStreams) -> list[Archived]:
    """Trajectories that any epoch has trained on, that `progress` lacks and the stream no longer has, oldest first.

    After a plain crash there are none: what no checkpoint holds was not settled and is delivered again. After a
    fall-back they may lie in any abandoned epoch, at updates before or after this one's.
    """
    held, lacking = _sorted_out(archive, progress)
    forgone = set(progress.forgone_ids)
    found: dict[str, Archived] = {}
    for step in sorted(lacking, key=lambda step: (step.epoch, step.update, step.step)):
        for trained in archive.load(step).trajectories:
            trajectory = Trajectory(trained.trajectory)
            if trajectory.id in forgone or trajectory.id in found:
                continue
            if await ride_out(partial(streams.payload, trajectory.id)) is not None:
                continue
            outcome = OUTCOME.validate_json(trained.outcome_json)
            if isinstance(outcome, Scored):
                found[trajectory.id] = Archived(trajectory, outcome)
    # An abandoned branch trains only what its beginning lacked, so what it shares with this one comes after that.
    first = min((step.update for step in lacking), default=0)
    for step in held:
        if not found:
            return []
        if step.update >= first:
            for trained in archive.load(step).trajectories:
                found.pop(trained.trajectory.id, None)
    if found:
        log.warning(
            "training again what the restored checkpoint lacks", trajectories=len(found), update=progress.update
        )
    return list(found.values())


def recent_values(archive: Archive, progress: Progress, trajectories: int) -> list[tuple[Sequence[float], float]]:
    """Values of the action tokens, and the reward, of the newest trajectories that `progress` holds, oldest first."""
    held, _ = _sorted_out(archive, progress)
    newest: list[tuple[Sequence[float], float]] = []
    for step in reversed(held):
        if len(newest) >= trajectories:
            break
        newest += [(trained.values, trained.reward) for trained in reversed(archive.load(step).trajectories)]
    return newest[:trajectories][::-1]


def recent_metrics(archive: Archive, progress: Progress, updates: int) -> list[Mapping[str, float]]:
    """Metrics of the newest `updates` policy updates that `progress` holds, oldest first."""
    held, _ = _sorted_out(archive, progress)
    return [dict(archive.load(step).metrics) for step in held[-updates:] if step.update > 0]


def _sorted_out(archive: Archive, progress: Progress) -> tuple[list[StepName], list[StepName]]:
    """The archived steps that `progress` holds and those it lacks, each in the order of `StepName`."""
    held: list[StepName] = []
    lacking: list[StepName] = []
    for step in archive.steps():
        # Only the critic alone makes several steps at one update.
        critic_only = int(archive.load(step).metrics[CRITIC_ONLY]) if step.update == 0 else 0
        (held if progress.holds(step.epoch, step.update, critic_only) else lacking).append(step)
    return held, lacking
