"""What the live view shows of learning, gathered from `updates.jsonl` as it grows."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from sao.curves import WINDOW, dropped
from sao.rows import UpdateRow, read_rows

RATE_SPAN_S = 60.0
"""Rates are means over this much time."""


class Progress:
    """Follows the file; cheap to ask again and again."""

    def __init__(self, rows_file: Path) -> None:
        self._file = rows_file
        self._offset = 0
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._rates: deque[tuple[float, int, int]] = deque()
        self.averages: list[float] = []
        """Mean of the last (up to) 100 rewards, after each update."""
        self.trajectories = 0
        self.last: UpdateRow | None = None
        self.version = ""
        self.dropped = 0

    def poll(self) -> list[UpdateRow]:
        """Take in the rows written since the last call; they are returned."""
        new = []
        for row, offset in read_rows(self._file, self._offset):
            self._offset = offset
            self._take(row)
            new.append(row)
        return new

    def _take(self, row: UpdateRow) -> None:
        self._recent.extend(trajectory.reward for trajectory in row.trajectories)
        self.trajectories += len(row.trajectories)
        if self._recent:
            self.averages.append(sum(self._recent) / len(self._recent))
        tokens = sum(trajectory.tokens for trajectory in row.trajectories)
        self._rates.append((row.finished_s, tokens, len(row.trajectories)))
        while self._rates and self._rates[0][0] < row.finished_s - RATE_SPAN_S:
            self._rates.popleft()
        self.dropped = sum(dropped([row]).values())
        self.version = row.version or self.version
        self.last = row

    @property
    def update(self) -> int:
        """Policy updates made."""
        return self.last.update if self.last is not None else 0

    @property
    def average(self) -> float | None:
        """Mean of the last (up to) 100 rewards."""
        return self.averages[-1] if self.averages else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens trained on, prompt and observations included, a second over the last minute of updates."""
        return self._rate(1)

    @property
    def trajectories_per_s(self) -> float | None:
        """Trajectories trained on a second over the last minute of updates."""
        return self._rate(2)

    def _rate(self, field: int) -> float | None:
        span = self._rates[-1][0] - self._rates[0][0] if self._rates else 0.0
        # The first entry marks the start of the span; its own work was done before it.
        return sum(entry[field] for entry in list(self._rates)[1:]) / span if span > 0 else None

    @property
    def lag(self) -> float | None:
        """Mean lag of the last update's trajectories, in updates."""
        if self.last is None or not self.last.trajectories:
            return None
        return sum(trajectory.lag for trajectory in self.last.trajectories) / len(self.last.trajectories)
