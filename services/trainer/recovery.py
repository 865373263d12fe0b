"""What a restored trainer needs of the archive: the work its checkpoint lacks, and what was measured lately; and the
steps that made a run what it is.

The same update may have been made in several epochs, of which every fall-back to an older checkpoint has abandoned
one; `Progress.holds` tells them apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sao.archive import Archive, StepName
from sao.outcome import OUTCOME, Scored
from sao.rows import CRITIC_ONLY
from sao.slots import Slots
from sao.streams.base import TrajectoryStreams
from sao.streams.dispatch import slot_of
from sao.telemetry.logs import get_logger
from sao.trajectory import Trajectory
from services.trainer.checkpoint import Progress
from services.trainer.consumer import Archived
from services.trainer.outage import ride_out

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ArchivedStep:
    """One archived step, and where the run stood after it."""

    name: StepName
    critic_only: int
    """Steps of the critic alone made by then; 0 after the first policy update."""

    @property
    def position(self) -> tuple[int, int]:
        return self.name.update, self.critic_only


async def lost_work(
    archive: Archive, progress: Progress, streams: TrajectoryStreams, let_go: Collection[str] = ()
) -> list[Archived]:
    """Trajectories that any epoch has trained on, that `progress` lacks and the stream no longer has, oldest first.

    None of `let_go`: dropped since, when that checkpoint was written or after it.

    After a plain crash there are none: what no checkpoint holds was not settled and is delivered again. After a
    fall-back they may lie in any abandoned epoch, at updates before or after this one's.
    """
    again = offered_again(archive, progress, let_go)
    found: list[Archived] = []
    for step, ids in again.items():
        for trained in archive.load(step).trajectories:
            trajectory = Trajectory(trained.trajectory)
            if trajectory.id not in ids or await ride_out(partial(streams.payload, trajectory.id)) is not None:
                continue
            outcome = OUTCOME.validate_json(trained.outcome_json)
            if isinstance(outcome, Scored):
                found.append(Archived(trajectory, outcome, trained.routed_experts, trained.forgotten))
    if found:
        log.warning(
            "training again what the restored checkpoint lacks", trajectories=len(found), update=progress.update
        )
    return found


def offered_again(archive: Archive, progress: Progress, let_go: Collection[str] = ()) -> dict[StepName, set[str]]:
    """Trajectories that any epoch has trained on and `progress` lacks, by the step that trained on each first.

    Those that the stream still has among them, which brings them by itself; none of `let_go`.
    """
    held, lacking = (_names(steps) for steps in _sorted_out(archive, progress))
    forgone = {*progress.forgone_ids, *let_go}
    found: dict[str, StepName] = {}
    for step in sorted(lacking, key=lambda step: (step.epoch, step.update, step.step)):
        for trained in archive.load(step).trajectories:
            if trained.trajectory.id not in forgone:
                found.setdefault(trained.trajectory.id, step)
    # An abandoned branch trains only what its beginning lacked, so what it shares with this one comes after that.
    first = min((step.update for step in lacking), default=0)
    for step in held:
        if not found:
            break
        if step.update >= first:
            for trained in archive.load(step).trajectories:
                found.pop(trained.trajectory.id, None)
    again: dict[StepName, set[str]] = {}
    for trajectory_id, step in found.items():
        again.setdefault(step, set()).add(trajectory_id)
    return again


def undone(archive: Archive, progress: Progress, samples: int) -> dict[str, int]:
    """Trajectories of the steps that `progress` lacks, and their slots.

    Once their entries are gone, every restart offers them again.
    """
    _, lacking = _sorted_out(archive, progress)
    found = [trained.trajectory for step in lacking for trained in archive.load(step.name).trajectories]
    return {one.id: slot_of(one.ordinal, one.sample, samples) for one in found}


def never_again(progress: Progress, undone_slots: Iterable[int]) -> Slots:
    """Slots that need no other rollout: `progress` has trained on or dropped it, or the archive brings it again."""
    done = Slots(progress.done)
    for slot in undone_slots:
        done.add(slot)
    return done


def recent_values(
    archive: Archive, progress: Progress, trajectories: int, *, ranks: int = 1
) -> list[tuple[Sequence[float], float]]:
    """Values of the action tokens, and the reward, of the newest trajectories that `progress` holds, oldest first.

    Of several ranks, those that rank 0 has seen.
    """
    held, _ = _sorted_out(archive, progress)
    return values_of(archive, held, trajectories, ranks=ranks)


def values_of(
    archive: Archive, steps: Sequence[ArchivedStep], trajectories: int, *, ranks: int = 1
) -> list[tuple[Sequence[float], float]]:
    """`recent_values` of the state that these steps, in order, have made."""
    newest: list[tuple[Sequence[float], float]] = []
    for step in reversed(steps):
        if len(newest) >= trajectories:
            break
        share = archive.load(step.name).trajectories[::ranks]  # micro-step by micro-step, rank 0 first
        newest += [(trained.values, trained.reward) for trained in reversed(share)]
    return newest[:trajectories][::-1]


def recent_metrics(archive: Archive, progress: Progress, updates: int) -> list[Mapping[str, float]]:
    """Metrics of the newest `updates` policy updates that `progress` holds, oldest first."""
    held, _ = _sorted_out(archive, progress)
    return [dict(archive.load(step.name).metrics) for step in held[-updates:] if step.name.update > 0]


def effective_steps(archive: Archive, progress: Progress | None) -> list[ArchivedStep]:
    """The steps that made the run's present state, in order, none of an abandoned branch.

    `progress` is that of the newest checkpoint, none when there is none. Beyond it nothing but the epochs tells what
    was abandoned: each went on from where its first step begins, whatever earlier ones had made from there.
    """
    held: list[ArchivedStep] = []
    beyond = _steps(archive)
    if progress is not None:
        held, lacking = _sorted_out(archive, progress)
        end, epoch = (progress.update, progress.critic_only), progress.trainer_epoch
        beyond = [step for step in lacking if step.position > end and step.name.epoch >= epoch]
    effective: list[ArchivedStep] = []
    for step in sorted([*held, *beyond], key=lambda step: (step.name.epoch, step.position)):
        if effective and step.name.epoch > effective[-1].name.epoch:
            effective = [earlier for earlier in effective if earlier.position < step.position]
        effective.append(step)
    return effective


def _sorted_out(archive: Archive, progress: Progress) -> tuple[list[ArchivedStep], list[ArchivedStep]]:
    """The archived steps that `progress` holds and those it lacks, each in the order of `StepName`."""
    held: list[ArchivedStep] = []
    lacking: list[ArchivedStep] = []
    for step in _steps(archive):
        (held if progress.holds(step.name.epoch, *step.position) else lacking).append(step)
    return held, lacking


def _steps(archive: Archive) -> list[ArchivedStep]:
    """Every archived step; only the critic alone makes several at one update."""
    return [
        ArchivedStep(name, int(archive.load(name).metrics[CRITIC_ONLY]) if name.update == 0 else 0)
        for name in archive.steps()
    ]


def _names(steps: Sequence[ArchivedStep]) -> list[StepName]:
    return [step.name for step in steps]
