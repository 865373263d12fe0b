"""Signs of reward hacking in what is scored: what is rewarded rises while something else, or the length, collapses.

    |-- then --|----------|----------|-- now --|       four windows of `window` trajectories, the newest at the right

The mean of each component in the newest window is compared with the one in the oldest. Its move is counted in pooled
standard deviations, so that a noisy component has to move further:

- it *rises* by `rise` or more, where the preference rewards it (a positive weight, a gate or a threshold),
- it *collapses* by `collapse` or more, unless the preference itself weighs it down.

Each pair of a rising and a collapsing one is an alarm, until either has come back by a fifth of its bound. A move below
5 % of the level is none, however quiet the component. What was scored under another preference says nothing about
hacking: a new version begins a new history. Pure: no clock, no metric, no log; alarm_watch.py has those.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from sao.config.schema import AlarmsSection
from sao.preference import Preference, PreferenceDocument

LENGTH = "(length)"
"""Stands for the number of action tokens among the components; no component can have this name."""
WINDOWS = 4
CHECKS_PER_WINDOW = 10
LEAST_SHARE = 0.05
"""Of the level: a smaller move is no move."""
LARGEST = 1e100
CLEARED_AT = 0.8
"""Of a bound: an alarm ends when a move has come back to less than this."""


class Alarm(BaseModel):
    """One pair at one moment; JSON-serialisable, for whoever shows it."""

    model_config = ConfigDict(frozen=True)

    rising: str
    collapsing: str
    rise: float
    """In standard deviations, as `collapse` is."""
    collapse: float
    rising_from: float
    rising_to: float
    collapsing_from: float
    collapsing_to: float
    preference: int
    """The version that all of it was scored under."""


class Change(BaseModel):
    """An alarm that begins or ends."""

    model_config = ConfigDict(frozen=True)

    raised: bool
    alarm: Alarm


class _Move(BaseModel):
    then: float
    now: float
    deviations: float
    """Signed; 0 where the move is too small to be one."""


class Alarms:
    """The history of one replica, at most WINDOWS windows long."""

    def __init__(self, settings: AlarmsSection) -> None:
        self._settings = settings
        self._history: deque[Mapping[str, float]] = deque(maxlen=WINDOWS * settings.window)
        self._active: dict[tuple[str, str], Alarm] = {}
        self._version = 0
        self._seen = 0

    def active(self) -> list[Alarm]:
        """The alarms of now, as they were at the last look, by the names of their components."""
        return [self._active[pair] for pair in sorted(self._active)]

    def observe(self, values: Mapping[str, float], preference: Preference) -> list[Change]:
        """Take one scored trajectory: its components, LENGTH among them. What began or ended by it."""
        if preference.version < self._version:
            return []
        changes = self._begin_anew(preference.version) if preference.version > self._version else []
        self._history.append(values)
        self._seen += 1
        full = len(self._history) == self._history.maxlen
        if full and self._seen % max(self._settings.window // CHECKS_PER_WINDOW, 1) == 0:
            changes += self._look(preference)
        return changes

    def _begin_anew(self, version: int) -> list[Change]:
        ended = [Change(raised=False, alarm=alarm) for alarm in self.active()]
        self._history.clear()
        self._active.clear()
        self._version = version
        return ended

    def _look(self, preference: Preference) -> list[Change]:
        moves = self._moves()
        found = {
            (up, down): _alarm(up, down, moves, preference.version)
            for up in moves
            for down in moves
            if up != down and self._is_one(up, down, moves, preference.document)
        }
        began = [Change(raised=True, alarm=alarm) for pair, alarm in found.items() if pair not in self._active]
        ended = [Change(raised=False, alarm=alarm) for pair, alarm in self._active.items() if pair not in found]
        self._active = found
        return began + ended

    def _is_one(self, up: str, down: str, moves: Mapping[str, _Move], document: PreferenceDocument) -> bool:
        share = CLEARED_AT if (up, down) in self._active else 1.0
        rises = _rewarded(up, document) and moves[up].deviations >= share * self._settings.rise
        return rises and _not_unwanted(down, document) and moves[down].deviations <= -share * self._settings.collapse

    def _moves(self) -> dict[str, _Move]:
        window, history = self._settings.window, list(self._history)
        then, now = history[:window], history[-window:]
        # A component that is not in all of them (a scorer was added) has no history yet.
        names = set.intersection(*(set(values) for values in (*then, *now)))
        return {name: _move([v[name] for v in then], [v[name] for v in now]) for name in sorted(names)}


def _rewarded(name: str, document: PreferenceDocument) -> bool:
    return document.weights.get(name, 0.0) > 0 or name in document.gates or name in document.thresholds


def _not_unwanted(name: str, document: PreferenceDocument) -> bool:
    return document.weights.get(name, 0.0) >= 0


def _move(then: Sequence[float], now: Sequence[float]) -> _Move:
    scale = _scale([*then, *now])
    then, now = [x / scale for x in then], [x / scale for x in now]
    before, after = math.fsum(then) / len(then), math.fsum(now) / len(now)
    return _Move(then=before * scale, now=after * scale, deviations=_deviations(then, now, before, after))


def _scale(values: Sequence[float]) -> float:
    """1, or what brings huge values to where their squares and sums are numbers."""
    largest = max(map(abs, values))
    return largest if largest > LARGEST else 1.0


def _deviations(then: Sequence[float], now: Sequence[float], before: float, after: float) -> float:
    difference = after - before
    if abs(difference) < LEAST_SHARE * max(abs(before), abs(after)):
        return 0.0
    spread = math.fsum((x - before) ** 2 for x in then) + math.fsum((x - after) ** 2 for x in now)
    deviation = math.sqrt(spread / (len(then) + len(now) - 2))
    if deviation == 0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / deviation


def _alarm(up: str, down: str, moves: Mapping[str, _Move], version: int) -> Alarm:
    return Alarm(
        rising=up,
        collapsing=down,
        rise=_finite(moves[up].deviations),
        collapse=_finite(-moves[down].deviations),
        rising_from=moves[up].then,
        rising_to=moves[up].now,
        collapsing_from=moves[down].then,
        collapsing_to=moves[down].now,
        preference=version,
    )


def _finite(deviations: float) -> float:
    """JSON knows no infinity: where nothing varied, the move is as many deviations as one likes."""
    return min(deviations, 1e6)
