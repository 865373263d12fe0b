"""Which engines may leave rotation for a round, so that the others go on meanwhile.

- An engine that serves needs a slot to leave rotation: `limit` of them at once, first come, first served. One that
  serves nobody anyway (starting, quarantined) needs none, and so it waits behind nobody.
- The last engine that serves stays while another may soon serve: it goes only when the others are away, that is, do
  not answer or have given the version up. Otherwise an engine that is dead for good would hold back every version.
- A slot comes back with the round's end, whatever that is; one that was not given back within `hold_s` is lost to its
  holder, so that a store that hangs under one keeper does not stop the rest.
- A place in the queue is kept by asking again; it lapses after `ask_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

from sao.telemetry.logs import get_logger
from services.weights import metrics

log = get_logger(__name__)


class Standing(Enum):
    """What an engine is to the others."""

    SERVING = "serving"
    COMING = "coming"
    """It serves nobody now, and is being brought to a version."""
    AWAY = "away"
    """It serves nobody, and nothing is tried on it for now."""


def half(engines: int) -> int:
    """Half of them, rounded up: two waves reach every engine, and from the second engine on somebody serves."""
    return max(1, (engines + 1) // 2)


class Slots:
    """One for the fleet; keepers tell it how they stand and ask it before they leave rotation."""

    def __init__(
        self,
        engines_out_max: int | None,
        *,
        hold_s: float,
        ask_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engines_out_max`: None for half of the engines there are."""
        self._most = engines_out_max
        self._hold_s = hold_s
        self._ask_s = ask_s
        self._clock = clock
        self._standing: dict[str, tuple[Standing, float]] = {}
        """And since when it was last said."""
        self._held: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        """When each last asked, in the order of their places."""
        self._since: dict[str, float] = {}

    @property
    def limit(self) -> int:
        """Serving engines that may be out for a round at once."""
        return self._most if self._most is not None else half(len(self._standing))

    @property
    def holders(self) -> frozenset[str]:
        """Engines in a round that they had a slot for."""
        return frozenset(self._held)

    def stands(self, engine_id: str, standing: Standing) -> None:
        """Note how this engine stands now."""
        self._standing[engine_id] = (standing, self._clock())

    def leave(self, engine_id: str) -> None:
        """Forget an engine that is no longer of the fleet."""
        self._standing.pop(engine_id, None)
        self.withdraw(engine_id)
        self.give_back(engine_id)

    def take(self, engine_id: str) -> bool:
        """Ask for a slot, again and again until it is given; whether this engine may leave rotation now."""
        now = self._clock()
        self._lapse(now)
        if engine_id in self._held:
            return True
        self._asked[engine_id] = now
        self._since.setdefault(engine_id, now)
        if not self._may_leave(engine_id):
            return False
        metrics.SLOT_WAIT_SECONDS.observe(now - self._since[engine_id])
        self.withdraw(engine_id)
        self._held[engine_id] = now
        self.stands(engine_id, Standing.COMING)
        metrics.ENGINES_OUT.set(len(self._held))
        return True

    def withdraw(self, engine_id: str) -> None:
        """Give a place in the queue up: there is nothing to leave rotation for any more."""
        self._asked.pop(engine_id, None)
        self._since.pop(engine_id, None)

    def give_back(self, engine_id: str) -> None:
        """The round is over; nothing happens without a slot."""
        self._held.pop(engine_id, None)
        metrics.ENGINES_OUT.set(len(self._held))

    def _may_leave(self, engine_id: str) -> bool:
        free = self.limit - len(self._held)
        others = [standing for other, (standing, _) in self._standing.items() if other != engine_id]
        if Standing.SERVING not in others and Standing.COMING in others:
            return False
        return list(self._asked).index(engine_id) < free

    def _lapse(self, now: float) -> None:
        for engine_id in [held for held, since in self._held.items() if now - since > self._hold_s]:
            log.error("slot taken back, its round does not end", engine=engine_id, held_s=now - self._held[engine_id])
            self.give_back(engine_id)
        for engine_id, (standing, since) in list(self._standing.items()):
            if standing is Standing.COMING and now - since > self._hold_s:
                self.stands(engine_id, Standing.AWAY)
        for engine_id in [asked for asked, last in self._asked.items() if now - last > self._ask_s]:
            self.withdraw(engine_id)
