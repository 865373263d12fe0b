"""What became of every trajectory that was acknowledged to a worker: pure, from evidence gathered after the run.

| fate | what shows it |
|---|---|
| trained | one step, and only one, of those that made the final checkpoint trained on it |
| dead | it is in the dead letters, with a reason |
| dropped | the trainer named it and a reason |
| waiting | it is on a stream, waits for feedback, or is in the archive to be trained on again, at the end of the run |
| named | the store lost it with its file, and the trainer named it (only a run that empties the store may have any) |
| lost | nothing of the above |

A worker that was told `accepted` or `duplicate` may forget the trajectory, so both are acknowledgements. `superseded`
is none: another rollout of the ordinal won, and this one must not train.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the run has left behind."""

    acknowledged: AbstractSet[str]
    """Ids that an answer `accepted` or `duplicate` has named on its way to a worker."""
    superseded: AbstractSet[str]
    """Ids whose answer was `superseded`."""
    trained: Sequence[str]
    """Ids in the steps that made the final checkpoint, in order; one in two steps is here twice."""
    dead: Mapping[str, str]
    """Reasons by id."""
    dropped: Mapping[str, str]
    """Reasons by id, also of trajectories that trained after all."""
    waiting: AbstractSet[str]
    """Ids on a stream or in the waiting room at the end, or in archived steps that the final checkpoint lacks: the next
    start trains them."""
    named: AbstractSet[str]
    """Ids that the trainer has named as lost with the store."""
    not_leased_again: AbstractSet[str]
    """Those of them whose prompt was neither leased again nor will be."""
    preferences: tuple[int, int]
    """The newest version on the board, and in the run's folder."""
    counted: Mapping[str, int]
    """What the trainer itself has counted as dropped or buried, by reason."""
    consumed: int
    """Trajectories that the final checkpoint itself claims to have trained on."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The audit's answer."""

    acknowledged: int
    fates: Mapping[str, int]
    dropped_by_reason: Mapping[str, int]
    dead_by_reason: Mapping[str, int]
    uncounted: Mapping[str, int]
    """Drops that are named and missing in the final checkpoint's count."""
    superseded: int
    lost: Sequence[str]
    twice: Sequence[str]
    trained_though_superseded: Sequence[str]
    dead_though_trained: Sequence[str]
    """A requeue of these dead letters would train them twice."""
    miscounted: int
    """Trajectories of the final checkpoint's steps minus what it claims."""
    not_leased_again: Sequence[str]
    preferences_lost: int

    @property
    def passed(self) -> bool:
        """Nothing lost, nothing twice, nothing that should not have been trained, and the books agree."""
        wrong = (self.lost, self.twice, self.trained_though_superseded, self.dead_though_trained)
        books = self.miscounted == self.preferences_lost == 0
        return self.acknowledged > 0 and not any(wrong) and not self.not_leased_again and books


def audit(evidence: Evidence) -> Verdict:
    """Give every acknowledged trajectory the first fate of the table that is shown."""
    times = Counter(evidence.trained)
    shown: dict[str, AbstractSet[str]] = {
        "trained": times.keys(),
        "dead": {trajectory_id for trajectory_id, reason in evidence.dead.items() if reason},
        "dropped": {trajectory_id for trajectory_id, reason in evidence.dropped.items() if reason},
        "waiting": evidence.waiting,
        "named": evidence.named,
    }
    fate_of = {
        trajectory_id: next((fate for fate, ids in shown.items() if trajectory_id in ids), "lost")
        for trajectory_id in sorted(evidence.acknowledged)
    }
    dropped = Counter(evidence.dropped[trajectory_id] for trajectory_id, fate in fate_of.items() if fate == "dropped")
    return Verdict(
        acknowledged=len(fate_of),
        fates=dict(Counter(fate_of.values())),
        dropped_by_reason=dict(dropped),
        dead_by_reason=dict(Counter(reason.partition(":")[0] for reason in evidence.dead.values())),
        uncounted=dict(dropped - Counter(evidence.counted)),
        superseded=len(evidence.superseded),
        lost=[trajectory_id for trajectory_id, fate in fate_of.items() if fate == "lost"],
        twice=sorted(trajectory_id for trajectory_id, count in times.items() if count > 1),
        trained_though_superseded=sorted(times.keys() & evidence.superseded),
        dead_though_trained=sorted(times.keys() & evidence.dead.keys()),
        miscounted=len(evidence.trained) - evidence.consumed,
        not_leased_again=sorted(evidence.not_leased_again),
        preferences_lost=max(evidence.preferences[1] - evidence.preferences[0], 0),
    )


def falls(versions: Sequence[str]) -> list[tuple[str, str]]:
    """Where a sequence of version names goes back; their order is that of their names."""
    return [(before, after) for before, after in pairwise(versions) if after < before]
