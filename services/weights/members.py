"""Which engines are of the fleet: a keeper for each that discovery names, from its arrival to its departure.

- An engine that joins is brought up like any other: it is in rotation when its keeper has proven it.
- An engine that is not named any more leaves after `absent_looks` answers without it in a row. Its keeper ends the
  round it is in; then the board forgets the engine, and its leases are given back.
- A look that fails changes nothing, and the first look after a start is one of several, like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from sao.streams.base import StreamUnavailableError
from sao.telemetry.logs import get_logger
from sao.weights.base import VersionStoreError
from services.weights import metrics
from services.weights.discovery.base import Discovery, DiscoveryError, Located
from services.weights.engines.base import EngineControl
from services.weights.fleet import Fleet
from services.weights.keeper import Keeper
from services.weights.slots import Slots

log = get_logger(__name__)


@dataclass
class _Member:
    engine: EngineControl
    keeper: Keeper
    stop: asyncio.Event
    task: asyncio.Task[None] | None = None
    absent: int = 0
    """Answers without it, in a row."""


class Members:
    """The fleet's keepers."""

    def __init__(
        self,
        discovery: Discovery,
        fleet: Fleet,
        slots: Slots,
        *,
        make_engine: Callable[[Located], EngineControl],
        make_keeper: Callable[[EngineControl], Keeper],
        absent_looks: int = 3,
    ) -> None:
        self._discovery = discovery
        self._fleet = fleet
        self._slots = slots
        self._make_engine = make_engine
        self._make_keeper = make_keeper
        self._absent_looks = absent_looks
        self._members: dict[str, _Member] = {}
        self._group: asyncio.TaskGroup | None = None
        self.keepers: list[Keeper] = []
        """Of now: this list itself changes."""
        self._silence = ""
        """Why the last look failed: said once, not every few seconds."""

    async def close(self) -> None:
        """Give the connections to every engine back."""
        for member in self._members.values():
            await member.engine.close()

    async def begin(self) -> None:
        """Take in those that are there now, and those that an earlier process knew.

        One answer without them proves nothing. An engine that has another name by now is forgotten at once: it must
        not have two keepers.
        Raises DiscoveryError, StreamUnavailableError.
        """
        found = await self._discovery.look()
        for located in found:
            if located.engine_id not in self._members:
                self._join(located)
        addresses = {located.url for located in found}
        for facts in (await self._fleet.board.engines()).values():
            if facts.engine_id not in self._members and facts.url not in addresses:
                self._join(Located(facts.engine_id, facts.url)).absent = 1
        await self._fleet.restore()
        for member in self._members.values():
            await member.keeper.restore()
        for engine_id in sorted((await self._fleet.board.engines()).keys() - self._members.keys()):
            log.info("the board forgets an engine that left the run", engine=engine_id)
            await self._fleet.board.remove_engine(engine_id, epoch=self._fleet.epoch)

    async def run(self, stop: asyncio.Event, every_s: float) -> None:
        """Keep every engine, and look for others every `every_s`, until told to stop; rounds are finished."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for member in self._members.values():
                self._start(member)
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(every_s):
                        await stop.wait()
                if not stop.is_set():
                    await self._unless(stop, self.look())
            for member in self._members.values():
                member.stop.set()
            self._fleet.notify()

    async def _unless(self, stop: asyncio.Event, call: Coroutine[None, None, None]) -> None:
        """The call, given up when the service is told to stop meanwhile: a name server must not keep it."""
        work, stopped = asyncio.ensure_future(call), asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        finally:
            for task in (work, stopped):
                task.cancel()

    async def look(self) -> None:
        """Ask once who is there, and follow the answer as far as board and store take it."""
        try:
            found = {located.engine_id: located for located in await self._discovery.look()}
        except DiscoveryError as error:
            metrics.STORE_ERRORS.labels("discovery").inc()
            if str(error) != self._silence:
                self._silence = str(error)
                log.warning("engines can't be looked up, those that are known stay", error=str(error))
            return
        self._silence = ""
        for engine_id, member in sorted(self._members.items()):
            member.absent = 0 if engine_id in found else member.absent + 1
            if member.stop.is_set() or member.absent >= self._absent_looks:
                await self._part_with(engine_id)
        for located in found.values():
            if located.engine_id not in self._members:
                await self._take_in(located)

    def _join(self, located: Located) -> _Member:
        log.info("engine joins", engine=located.engine_id, url=located.url)
        engine = self._make_engine(located)
        self._fleet.join(located.engine_id)
        member = _Member(engine, self._make_keeper(engine), asyncio.Event())
        self._members[located.engine_id] = member
        self.keepers.append(member.keeper)
        return member

    async def _take_in(self, located: Located) -> None:
        member = self._join(located)
        try:
            await member.keeper.restore()
        except (StreamUnavailableError, VersionStoreError, OSError) as error:
            # Its keeper tells the board later: nothing but its history is missed, and no turn from before is believed.
            log.warning("what was known of an engine is not", engine=located.engine_id, error=str(error))
        self._start(member)

    def _start(self, member: _Member) -> None:
        if self._group is not None:
            member.task = self._group.create_task(member.keeper.run(member.stop))

    async def _part_with(self, engine_id: str) -> None:
        """End its keeper, then forget the engine; what board or store refuse is tried again at the next look."""
        member = self._members[engine_id]
        if not member.stop.is_set():
            log.info("engine leaves", engine=engine_id, answers_without_it=member.absent)
            member.stop.set()
            self._fleet.notify()
        if member.task is not None and not member.task.done():
            return  # in a round, whose steps have deadlines
        try:
            await self._fleet.board.remove_engine(engine_id, epoch=self._fleet.epoch)
            for holder in (engine_id, member.keeper.loading):
                await asyncio.to_thread(self._fleet.store.release, holder)
        except (StreamUnavailableError, VersionStoreError, OSError) as error:
            log.warning("engine that left is not forgotten yet", engine=engine_id, error=str(error))
            return
        self._slots.leave(engine_id)
        self._fleet.leave(engine_id)
        metrics.forget(engine_id)
        self.keepers.remove(member.keeper)
        del self._members[engine_id]
        await member.engine.close()
