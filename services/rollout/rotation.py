"""Which engine the next turn runs on, and when a finished turn may be believed.

- A turn starts only on an engine in rotation, as the board said when it last answered: at most `refresh_s` ago, unless
  it is away. No turn is believed then until it answers.
- Where engines come and go, one that the board names gets a client, and one that it names no more loses it when its
  last turn has ended; the board names an engine before it is in rotation.
- A finished turn is withheld until its engine has passed the canary of every version that sampled it: turns that
  resume while an engine verifies itself sample under weights that nobody has checked yet, so none is believed then,
  whatever label it bears. What counts is what the board says after the turn has ended: an engine may be brought to a
  version anew that it has passed long ago. A board that does not name the engine says nothing: it may have been
  emptied. Only where engines come and go, and it names others, has this one left.
- A turn that ends on a quarantined engine is not believed, whatever versions it names: after a failed load the old
  label may stand on weights that are neither the old ones nor the new. Nor is one that was under way when its engine
  was in doubt, though it has recovered since: the same label may have stood on two sets of weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import TypeVar

from sao.board.base import Board, EngineFacts, EngineState
from sao.streams.base import StreamUnavailableError
from sao.telemetry.logs import get_logger
from services.rollout import metrics
from services.rollout.engines.base import Engine, EngineError, EngineTimeoutError, EngineUnavailableError

log = get_logger(__name__)
_T = TypeVar("_T")

_COOL_OFF_S = 5.0
"""An engine that failed a turn is the last choice for this long: it has no load, so it would draw every turn."""


class NoEngineError(EngineError):
    """No engine came into rotation within the deadline."""

    kind = "no_engine"

    def __init__(self, timeout_s: float, states: object) -> None:
        super().__init__("rotation", f"no engine in rotation within {timeout_s:g} s, engines: {states}")


class UnverifiedVersionError(EngineError):
    """A version that sampled this turn was not verified on its engine, so the turn can't be used."""

    kind = "unverified"


class Rotation:
    """A cached view of the board's engines, with this worker's own load on each."""

    def __init__(
        self,
        board: Board,
        engines: Mapping[str, Engine],
        *,
        connect: Callable[[EngineFacts], Engine] | None = None,
        refresh_s: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connect`: makes a client for an engine that the board names; None: there are only `engines`."""
        self._board = board
        self._engines: dict[str, Engine] = {}
        self._connect = connect
        self._refresh_s = refresh_s
        self._clock = clock
        self._facts: dict[str, EngineFacts] = {}
        self._last: dict[str, EngineFacts] = {}
        """Of engines that the board names no more, too: what it said last."""
        self._asked_at = float("-inf")
        """When the board was asked for what is known here."""
        self._served: dict[str, str] = {}
        """What each engine served when it was last seen in rotation: never a version that is still being loaded."""
        self._verified: dict[str, set[str]] = {}
        self._load: dict[str, int] = {}
        self._idle_since: dict[str, float] = {}
        self._failed_at: dict[str, float] = {}
        self._changed = asyncio.Condition()
        for engine_id, engine in engines.items():
            self._add(engine_id, engine)

    def load(self, engine_id: str) -> int:
        """Turns of this worker in flight there."""
        return self._load[engine_id]

    def served(self, engine_id: str) -> str:
        """The version that this engine serves, as far as is known here; an engine that had a turn has one."""
        return self._served[engine_id]

    def doubted(self, engine_id: str) -> float:
        """When it was last in doubt what this engine serves, as far as is known here; to be asked as a turn begins."""
        return self._facts[engine_id].doubted_s

    async def refresh(self) -> None:
        """Read the board once and wake whoever waits."""
        asked_at = self._clock()
        facts = await self._board.engines()
        if self._connect is not None:
            for engine_id in facts.keys() - self._engines.keys():
                self._add(engine_id, self._connect(facts[engine_id]))
        async with self._changed:
            if asked_at < self._asked_at:  # overtaken by one that was asked later
                return
            self._asked_at = asked_at
            self._facts = {engine_id: found for engine_id, found in facts.items() if engine_id in self._engines}
            for engine_id, found in self._facts.items():
                # The board keeps the last 16; a long turn may have crossed more.
                self._verified[engine_id].update(found.verified)
                self._last[engine_id] = found
                if found.in_rotation:
                    self._served[engine_id] = found.version
            self._changed.notify_all()
        if self._connect is not None:
            await self._let_go(self._engines.keys() - facts.keys())
        for engine_id, count in self._load.items():
            if count == 0:
                self._count_idle(engine_id)

    async def _let_go(self, gone: Iterable[str]) -> None:
        for engine_id in gone:
            # Whoever read the board at the same time may have let it go while another one was closed.
            if self._load.get(engine_id) == 0:
                for known in (self._load, self._idle_since, self._failed_at):
                    del known[engine_id]
                # What it has verified stays until another comes under its name: a turn of it may wait to be believed.
                await self._engines.pop(engine_id).close()

    def _add(self, engine_id: str, engine: Engine) -> None:
        self._engines[engine_id] = engine
        self._verified[engine_id] = set()
        self._load[engine_id] = 0
        self._idle_since[engine_id] = self._clock()
        self._failed_at[engine_id] = float("-inf")

    async def close(self) -> None:
        """Give the connections to every engine back."""
        for engine in self._engines.values():
            await engine.close()

    async def run(self) -> None:
        """Refresh until cancelled; a board that does not answer leaves the view as it was."""
        answers = True
        while True:
            try:
                await self.refresh()
            except StreamUnavailableError as error:
                if answers:
                    log.warning("board does not answer, the view of the engines is stale", error=str(error))
                answers = False
            else:
                answers = True
            await asyncio.sleep(self._refresh_s)

    async def serving(self, *, timeout_s: float) -> bool:
        """Whether any engine is in rotation, waiting at most `timeout_s` for one."""
        return await self._wait(lambda: self._choose(None), timeout_s) is not None

    @contextlib.asynccontextmanager
    async def turn(self, *, timeout_s: float, prefer: str | None = None) -> AsyncIterator[Engine]:
        """An engine in rotation for one turn: `prefer` while it is in, else the least loaded one.

        Raises NoEngineError when none is in rotation within `timeout_s`.
        """
        started = self._clock()
        engine_id = await self._wait(lambda: self._choose(prefer), timeout_s)
        if engine_id is None:
            states = {name: facts.state.value for name, facts in self._facts.items()} or "none on the board"
            raise NoEngineError(timeout_s, states)
        metrics.ROTATION_WAIT_SECONDS.observe(self._clock() - started)
        self._count_idle(engine_id)
        self._load[engine_id] += 1
        metrics.ENGINE_TURNS.labels(engine_id).set(self._load[engine_id])
        try:
            yield self._engines[engine_id]
        except (EngineUnavailableError, EngineTimeoutError):
            self._failed_at[engine_id] = self._clock()
            raise
        finally:
            self._load[engine_id] -= 1
            self._idle_since[engine_id] = self._clock()
            metrics.ENGINE_TURNS.labels(engine_id).set(self._load[engine_id])

    async def verified(
        self, engine_id: str, versions: Iterable[str], *, timeout_s: float, doubted: float | None = None
    ) -> None:
        """Return when the engine has passed the canary of all these versions.

        Raises UnverifiedVersionError after `timeout_s`, or at once when the engine is quarantined, has left before it
        served again, or was in doubt since `doubted`, which is what `doubted()` said when the turn began.
        """
        wanted = set(versions)
        started = self._clock()

        def settled() -> bool | None:
            facts, left = self._facts.get(engine_id), False
            if facts is None and self._connect is not None and self._facts:
                facts, left = self._last.get(engine_id), True
            if facts is None:
                return None
            if facts.state is EngineState.QUARANTINED or (left and not facts.in_rotation):
                return False
            if doubted not in {None, facts.doubted_s}:
                return False
            sure = self._asked_at >= started and facts.state is not EngineState.VERIFYING
            if not facts.in_rotation and facts.version in wanted:
                sure = False
            return True if sure and wanted <= self._verified[engine_id] else None

        with contextlib.suppress(StreamUnavailableError):  # `run` says so, and asks again
            await self.refresh()
        outcome = await self._wait(settled, timeout_s)
        metrics.WITHHELD_SECONDS.observe(self._clock() - started)
        if outcome is False:
            text = f"turn of {sorted(wanted)}, but the engine is quarantined, or was while the turn ran, or left"
            raise UnverifiedVersionError(engine_id, text)
        if outcome is None:
            missing = sorted(wanted - self._verified[engine_id])
            what = f"versions {missing} have not passed their canary" if missing else f"{sorted(wanted)} were not sure"
            raise UnverifiedVersionError(engine_id, f"{what} within {timeout_s:g} s")

    def _choose(self, prefer: str | None) -> str | None:
        serving = [engine_id for engine_id, facts in self._facts.items() if facts.in_rotation]
        sound = [engine_id for engine_id in serving if self._clock() - self._failed_at[engine_id] >= _COOL_OFF_S]
        if prefer in sound:
            return prefer
        return min(sound or serving, key=lambda engine_id: self._load[engine_id], default=None)

    async def _wait(self, condition: Callable[[], _T | None], timeout_s: float) -> _T | None:
        """The first value that is not None; None after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                while True:
                    value = condition()
                    if value is not None:
                        return value
                    await self._changed.wait()
        return None

    def _count_idle(self, engine_id: str) -> None:
        if self._load[engine_id] == 0:
            now = self._clock()
            metrics.ENGINE_IDLE.labels(engine_id).inc(now - self._idle_since[engine_id])
            self._idle_since[engine_id] = now
