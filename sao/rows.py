"""`updates.jsonl` in the run folder: one line for each optimiser update, appended by the trainer after the step.

The live view, `sao report` and tests read it; it is derived data, the archive is the record.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

CRITIC_ONLY = "critic_only_updates"
"""Metric that counts the updates of the critic alone: it tells the rows and archived steps at update 0 apart."""


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainedRow(_Row):
    """One trajectory of an update."""

    id: str
    ordinal: int
    reward: float
    """As trained, under `trained_under`."""
    scored_under: int
    trained_under: int
    scoring_started_s: float
    consumed_s: float
    """Unix seconds at which the trainer took it."""
    lag: int
    """Updates between the trainer and the oldest token, at consumption."""
    versions: int
    """Distinct weight versions inside it."""
    tokens: int
    action_tokens: int
    turns: int
    finish_reason: str


class UpdateRow(_Row):
    """One optimiser update."""

    update: int
    """Policy updates made after this row; unchanged while only the critic trains."""
    critic_only: bool
    phase: str = ""
    """How far the critic's pre-training or warm-up is, in words; empty once the policy trains."""
    held: list[str] = []
    """Guards that hold publishing after it: name, value and limit of each."""
    version: str
    """The version published after it; empty when none was."""
    trainer_epoch: int
    preference_version: int
    finished_s: float
    trajectories: list[TrainedRow]
    dropped: dict[str, int]
    """Dropped since the run began, by reason."""
    metrics: dict[str, float]

    @property
    def position(self) -> tuple[int, int]:
        """(policy updates, critic-only updates) made after this row; rises from row to row of one epoch."""
        return self.update, int(self.metrics.get(CRITIC_ONLY, 0))


def read_rows(path: Path, start: int = 0) -> Iterator[tuple[UpdateRow, int]]:
    """Every complete line from byte `start` on, each with the offset after it; a torn last line is left for later."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            yield UpdateRow.model_validate_json(line), start
