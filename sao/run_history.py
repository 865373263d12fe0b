"""A run's course for whoever watches it: `updates.jsonl` and `served.jsonl` followed as they grow.

Memory does not grow with the run, only with the number of preferences.

- A point is kept for each trajectory whose number is a multiple of `stride`; the stride doubles when there are more
  than MAX_POINTS. It follows from the number of trajectories alone, so every process that reads gives the same points.
- After a fall-back to an older checkpoint the abandoned updates are forgotten (as in sao.curves.effective_rows), and
  `history` becomes the epoch that began anew: who has points of another history must forget them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from sao.adaptation import SERVED_FILE, read_served
from sao.curves import WINDOW, Adaptation, Courses, PreferenceSwitch
from sao.preference import Preference
from sao.rows import TrainedRow, UpdateRow, read_rows

MAX_POINTS = 512
MAX_IDS = 8192
"""Newest trained trajectories that are known by id."""
MAX_SWITCHES = 128
"""The newest ones are kept."""
RATE_SPAN_S = 60.0
"""Rates are means over this much time, or over the newest MAX_POINTS updates."""


class HistoryPoint(BaseModel):
    """The course after one trajectory."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    trajectory: int
    """Counting from 1."""
    update: int
    wall_s: float
    """Seconds since the run's first trajectory was consumed."""
    moving_average: float
    """Mean of the last (up to) 100 rewards, each as it was trained."""
    components: dict[str, float]
    """The same mean of each raw component."""


class Curves(BaseModel):
    """What a reader that has the points up to `after` lacks."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    history: int
    """Trainer epoch that last fell back to an older checkpoint, 0: none did. When it changes, begin at 0 again."""
    stride: int
    """Points whose trajectory is no multiple of this are no longer kept."""
    points: list[HistoryPoint]
    latest: HistoryPoint | None
    """After the newest trajectory, kept or not."""
    switches: list[PreferenceSwitch]
    caught_up: bool
    """False: rows of the file wait to be read; ask again."""


class RunHistory:
    """Follows one file; `poll` reads on, everything else answers from memory. Not for several threads at once."""

    def __init__(
        self, rows_file: Path, *, max_points: int = MAX_POINTS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = rows_file
        self._served_file = rows_file.with_name(SERVED_FILE)
        self._max_points = max_points
        self._clock = clock
        self._begins: dict[int, tuple[int, int]] = {}
        """Where each trainer epoch began."""
        self.history = 0
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._served_offset = 0
        self._courses = Courses()
        self._stride = 1
        self._points: list[HistoryPoint] = []
        self._switches: deque[PreferenceSwitch] = deque(maxlen=MAX_SWITCHES)
        self._scored_under: int | None = None
        self._recent: deque[TrainedRow] = deque(maxlen=WINDOW)
        self._rates: deque[tuple[float, int, int]] = deque(maxlen=MAX_POINTS)
        self._ids: deque[str] = deque(maxlen=MAX_IDS)
        self._start_s: float | None = None
        self._latest: HistoryPoint | None = None
        self.caught_up = False
        self.trajectories = 0
        self.last: UpdateRow | None = None
        self.version = ""

    def poll(self, budget_s: float = 1.0) -> None:
        """Take in rows written since the last call, for about `budget_s`; `caught_up` says whether all of them.

        Raises OSError for a file that cannot be read, pydantic.ValidationError for a line that is no row.
        """
        deadline = self._clock() + budget_s
        if self._file.exists() and self._file.stat().st_size < self._offset:
            self._begins.clear()  # another file than the one that was read
            self._forget()
        self.caught_up = False
        while not self._read_on(deadline):
            if self._clock() > deadline:
                return
        for served, offset in read_served(self._served_file, self._served_offset):
            self._served_offset = offset
            self._courses.serve(served.version, served.at_s)
            if self._clock() > deadline:
                return
        self.caught_up = True

    def _read_on(self, deadline: float) -> bool:
        """Whether the end of the file was reached; False also where it must be read anew."""
        for row, offset in read_rows(self._file, self._offset):
            if row.trainer_epoch not in self._begins:
                self._begins[row.trainer_epoch] = row.position
                if self.last is not None and row.position <= self.last.position:
                    self._forget()
                    self.history = row.trainer_epoch
                    return False
            self._offset = offset
            if self.counts(row):
                self._take(row)
            if self._clock() > deadline:
                return False
        return True

    def counts(self, row: UpdateRow) -> bool:
        """Whether it helped to make the present weights, as far as the file was read."""
        return all(row.position < begin for epoch, begin in self._begins.items() if epoch > row.trainer_epoch)

    def _take(self, row: UpdateRow) -> None:
        self.last = row
        self._courses.take(row)
        self.version = row.version or self.version
        self._rates.append((row.finished_s, sum(one.tokens for one in row.trajectories), len(row.trajectories)))
        while self._rates[0][0] < row.finished_s - RATE_SPAN_S:
            self._rates.popleft()
        if self._start_s is None and row.trajectories:
            self._start_s = min(one.consumed_s for one in row.trajectories)
        for number, one in enumerate(row.trajectories, start=self.trajectories + 1):
            self._recent.append(one)
            self._ids.append(one.id)
            self._note_switch(one, number, row.update)
            newest = number == self.trajectories + len(row.trajectories)
            if newest or number % self._stride == 0:
                self._latest = self._point(one, number, row.update)
            if number % self._stride == 0 and self._latest is not None:
                self._points.append(self._latest)
                self._thin_out()
        self.trajectories += len(row.trajectories)

    def _point(self, one: TrainedRow, number: int, update: int) -> HistoryPoint:
        return HistoryPoint(
            trajectory=number,
            update=update,
            wall_s=one.consumed_s - (self._start_s or 0.0),
            moving_average=_mean(recent.reward for recent in self._recent) or 0.0,
            components=component_means(self._recent),
        )

    def _note_switch(self, one: TrainedRow, number: int, update: int) -> None:
        before = self._scored_under
        if before is not None and one.scored_under > before:
            self._switches.append(
                PreferenceSwitch(
                    from_version=before,
                    to_version=one.scored_under,
                    trajectory=number,
                    update=update,
                    wall_s=one.consumed_s - (self._start_s or 0.0),
                )
            )
        self._scored_under = max(before or 0, one.scored_under)

    def _thin_out(self) -> None:
        if len(self._points) > self._max_points:
            self._stride *= 2
            self._points = [point for point in self._points if point.trajectory % self._stride == 0]

    def curves(self, after: int = 0) -> Curves:
        """The points after trajectory `after`; every switch that is kept."""
        return Curves(
            history=self.history,
            stride=self._stride,
            points=[point for point in self._points if point.trajectory > after],
            latest=self._latest,
            switches=list(self._switches),
            caught_up=self.caught_up,
        )

    def adaptation(self, preference: Preference) -> Adaptation:
        """How the run has followed this preference."""
        return self._courses.adaptation(preference)

    @property
    def newest_ids(self) -> frozenset[str]:
        """The newest trajectories that were trained on."""
        return frozenset(self._ids)

    @property
    def average(self) -> float | None:
        """Mean of the last (up to) 100 rewards."""
        return _mean(one.reward for one in self._recent)

    @property
    def components(self) -> dict[str, float]:
        """Means of the raw components of the last (up to) 100 trajectories."""
        return component_means(self._recent)

    @property
    def lag(self) -> float | None:
        """Mean lag of the last update's trajectories, in updates."""
        return _mean(float(one.lag) for one in self.last.trajectories) if self.last is not None else None

    @property
    def trajectories_per_s(self) -> float | None:
        """Trajectories trained on a second over the last minute of updates."""
        return self._rate(2)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens trained on, prompt and observations included, a second over the last minute of updates."""
        return self._rate(1)

    def _rate(self, field: int) -> float | None:
        span = self._rates[-1][0] - self._rates[0][0] if self._rates else 0.0
        # The first entry marks the start of the span; its own work was done before it.
        return sum(entry[field] for entry in list(self._rates)[1:]) / span if span > 0 else None


def component_means(rows: Sequence[TrainedRow] | deque[TrainedRow]) -> dict[str, float]:
    """Mean of each component over the trajectories that have it."""
    names = sorted({name for row in rows for name in row.components})
    means = {name: _mean(row.components[name] for row in rows if name in row.components) for name in names}
    return {name: mean for name, mean in means.items() if mean is not None}


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
