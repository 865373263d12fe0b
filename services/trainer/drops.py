"""What did not train, and why: a line each in `<run.dir>/dropped.jsonl`, written before its stream entry goes.

A drop is final when its line is written, whatever becomes of the updates around it: what a killed trainer has begun
to drop, the next one finishes. The lines survive the process; a crash of the machine may take the newest, and what is
still on the stream is then decided about again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from sao.atomic import append_line
from sao.rows import UpdateRow

FILE = "dropped.jsonl"
REMEMBERED = 1024
"""Newest lines whose entries may still come: drops are made one after the other, so of a killed trainer it is one."""


class Drop(BaseModel):
    """One trajectory that will not train."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trajectory: str
    entry: str
    """On the stream; a requeued letter gets another. Empty: it came from the archive."""
    reason: str
    buried: bool
    """It became a dead letter, which may be requeued."""
    trainer_epoch: int


class Life(BaseModel):
    """A trainer begins: lines of lower epochs that come after it are those of one that was stopped and replaced."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trainer_epoch: int


_LINE: TypeAdapter[Drop | Life] = TypeAdapter(Drop | Life)


class Drops:
    """Every drop of a run; without a path, of this process alone."""

    def __init__(self, path: Path | None = None, *, epoch: int = 0, counted: Mapping[str, int] | None = None) -> None:
        """`counted`: known otherwise, where an earlier release has dropped without a line."""
        self._path = path
        self._epoch = epoch
        self.counts: Counter[str] = Counter()
        """Trajectories that did not train, by reason, since the run began."""
        newest: deque[Drop] = deque(maxlen=REMEMBERED)
        if path is not None:
            for drop in read_drops(path):
                self.counts[drop.reason] += 1
                newest.append(drop)
            append_line(path, Life(trainer_epoch=epoch).model_dump_json().encode())
        self.counts |= Counter(counted or {})
        self._known = {(drop.trajectory, drop.entry): drop for drop in newest}

    @classmethod
    def of(cls, folder: Path, epoch: int, checkpointed: Mapping[str, int]) -> Drops:
        """Those of the run in this folder, for the trainer of this epoch."""
        return cls(folder / FILE, epoch=epoch, counted=_counted(folder / "updates.jsonl", checkpointed))

    def add(self, trajectory_id: str, entry_id: str, reason: str, *, buried: bool = False) -> bool:
        """Write it down and count it; False when it is known, from before an outage or a crash in the middle of it."""
        if (trajectory_id, entry_id) in self._known:
            return False
        drop = Drop(trajectory=trajectory_id, entry=entry_id, reason=reason, buried=buried, trainer_epoch=self._epoch)
        if self._path is not None:
            append_line(self._path, drop.model_dump_json().encode())
        self._known[trajectory_id, entry_id] = drop
        self.counts[reason] += 1
        return True

    def begun(self, trajectory_id: str, entry_id: str) -> str | None:
        """The reason why this very entry is to be dropped, where that is decided; a burial is decided about anew."""
        drop = self._known.get((trajectory_id, entry_id))
        return None if drop is None or drop.buried else drop.reason

    def done(self, trajectory_id: str, entry_id: str) -> None:
        """Its entry is gone and will not come again."""
        self._known.pop((trajectory_id, entry_id), None)

    def let_go(self) -> set[str]:
        """Ids of all that were dropped, none of which the archive may offer again."""
        return let_go(self._path) if self._path else set()


def let_go(path: Path) -> set[str]:
    """Ids of all that were dropped, by the file of a run."""
    return {drop.trajectory for drop in read_drops(path) if not drop.buried}


def read_drops(path: Path) -> Iterator[Drop]:
    """Every drop that counts, oldest first."""
    if not path.exists():
        return
    epoch = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            found = _LINE.validate_json(line)
            epoch = max(epoch, found.trainer_epoch)
            if isinstance(found, Drop) and found.trainer_epoch == epoch:
                yield found


def _counted(rows: Path, checkpointed: Mapping[str, int]) -> Counter[str]:
    """The rows may have counted more than the checkpoint: a drop is not undone with the updates around it."""
    lines = rows.read_bytes().split(b"\n")[:-1] if rows.exists() else []
    return Counter(checkpointed) | Counter(UpdateRow.model_validate_json(lines[-1]).dropped if lines else {})
