"""Says, once at each change, that the store came to its mark, is full, or has room again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from sao.config.schema import RedisSection
from sao.store_memory import Pressure, StoreUse, advice, contents, pressure
from sao.telemetry.logs import get_logger
from services.rollout.ingest import metrics

log = get_logger(__name__)

CALM_S = 5.0
"""Around the mark the used share goes up and down with each trajectory: what counts is the most of this long."""

_WORDS = {
    Pressure.MARK: "store at its mark: ingest refuses, workers keep what they finish until there is room",
    Pressure.FULL: "store full: it takes nothing new, what it holds is kept and drains",
}


class PressureWatch:
    """Follows one store's readings; `clock` in Unix seconds."""

    def __init__(self, settings: RedisSection, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._seen: deque[tuple[float, Pressure]] = deque()
        self._pressure = Pressure.ROOM
        self._since = 0.0
        """When it came to the mark; 0 while there is room."""
        self._show()

    def see(self, use: StoreUse) -> None:
        """Take in one reading."""
        now = self._clock()
        self._seen.append((now, pressure(use.share, self._settings)))
        while self._seen[0][0] <= now - CALM_S:
            self._seen.popleft()
        found = max(level for _, level in self._seen)
        if found is not self._pressure:
            self._change(found, use, now)

    def _change(self, found: Pressure, use: StoreUse, now: float) -> None:
        used = f"{use.share:.0%}"
        if found is Pressure.ROOM:
            log.info("store has room again: ingest takes trajectories", used=used, after_s=round(now - self._since, 1))
            self._since = 0.0
        else:
            self._since = self._since or now
            say = log.error if found is Pressure.FULL else log.warning
            mark = f"{self._settings.back_pressure_at:.0%}"
            say(_WORDS[found], used=used, mark=mark, holds=contents(use), do=advice(use, self._settings))
        self._pressure = found
        self._show()

    def _show(self) -> None:
        for one in Pressure:
            metrics.STORE_PRESSURE.labels(one.label).set(1 if one is self._pressure else 0)
        metrics.STORE_PRESSURE_SINCE.set(self._since)
