"""`updates.jsonl` in the run folder: one line for each optimiser update, appended by the trainer after the step.

The live view, `sao report` and tests read it; it is derived data, the archive is the record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

CRITIC_ONLY = "critic_only_updates"
"""Metric that counts the updates of the critic alone: it tells the rows and archived steps at update 0 apart."""


_BLOCK = 1 << 16


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
    components: dict[str, float] = {}
    """Raw, as scored; empty in rows of an earlier release."""


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


def read_rows_back(path: Path, end: int | None = None) -> Iterator[tuple[UpdateRow, int, int]]:
    """Every complete line before byte `end`, newest first, each with its first byte and the offset after it."""
    for line, start, after in _lines_back(path, end):
        yield UpdateRow.model_validate_json(line), start, after


def find_row(path: Path, trajectory_id: str) -> UpdateRow | None:
    """The newest row that trained this trajectory; only that one is parsed."""
    needle = f'"id":"{trajectory_id}"'.encode()
    found = (UpdateRow.model_validate_json(line) for line, _, _ in _lines_back(path, None) if needle in line)
    return next((row for row in found if any(one.id == trajectory_id for one in row.trajectories)), None)


def _lines_back(path: Path, end: int | None) -> Iterator[tuple[bytes, int, int]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = size if end is None else min(end, size)
        data, torn = b"", True
        while start > 0:
            step = min(_BLOCK, start)
            start -= step
            file.seek(start)
            data = file.read(step) + data
            if torn:
                data = data[: data.rfind(b"\n") + 1] or data  # what follows the last complete line is left for later
                torn = not data.endswith(b"\n")
            while not torn and (newline := data.rfind(b"\n", 0, len(data) - 1)) >= 0:
                yield data[newline + 1 :], start + newline + 1, start + len(data)
                data = data[: newline + 1]
        if data.endswith(b"\n"):
            yield data, 0, len(data)
