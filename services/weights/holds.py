"""What keeps versions from being rolled out, by whom and why: recorded in the run's folder before it takes effect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import get_args

from sao.telemetry.logs import get_logger
from sao.weights.control import Control, ControlFile, Held, HeldBy, Pin
from services.weights import metrics
from services.weights.guards import Doubt

log = get_logger(__name__)


class Holds:
    """The control file's one writer. Each change rises `turn`, so that a choice made before it is known to be old."""

    def __init__(self, file: ControlFile, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._wall_clock = wall_clock
        self._lock = asyncio.Lock()
        self.control = Control()
        self.turn = 0

    async def restore(self) -> None:
        """Take over what an earlier process wrote; ControlFileError when that cannot be read."""
        self.control = await asyncio.to_thread(self._file.read)
        self._measure()
        if self.control.pin is not None:
            log.warning("publishing is still held", **self.control.pin.model_dump())

    async def pin(self, version: str, *, reason: str, client: str) -> None:
        """Stay on `version`, which nothing holds any more, until `resume`."""
        pin = Pin(version=version, by="activate", reason=reason, client=client, since_s=self._wall_clock())

        def change(now: Control) -> Control:
            held = {name: one for name, one in now.held.items() if name != version}
            return now.model_copy(update={"pin": pin, "held": held, "accepted": max(now.accepted or "", version)})

        await self._change(change)
        log.warning("version activated, newer ones wait", **pin.model_dump())

    async def hold(self, version: str, *, stay_on: str, reason: str, client: str) -> None:
        """Never roll out `version`, and stay on `stay_on` until `resume`; an earlier pin to that stays as it is."""
        now_s = self._wall_clock()
        one = Held(by="operator", reason=reason, client=client, since_s=now_s)
        pin = Pin(version=stay_on, by="hold", reason=f"{version}: {reason}", client=client, since_s=now_s)

        def change(now: Control) -> Control:
            kept = now.pin if now.pin is not None and now.pin.version == stay_on else pin
            return now.model_copy(update={"pin": kept, "held": now.held | {version: one}})

        await self._change(change)
        log.warning("version held, newer ones wait", version=version, serving=stay_on, reason=reason, client=client)

    async def resume(self, newest: str, *, reason: str, client: str) -> None:
        """Let publishing go on: no pin, and what the guards said up to `newest` is overruled."""

        def change(now: Control) -> Control:
            held = {name: one for name, one in now.held.items() if one.by == "operator"}
            return now.model_copy(
                update={"pin": None, "held": held, "accepted": max(now.accepted or "", newest) or None}
            )

        before = self.control
        await self._change(change)
        if self.control != before:
            log.warning("publishing resumed", newest=newest, reason=reason, client=client)

    async def doubted(self, version: str, doubt: Doubt, *, serving: str, stored: Collection[str]) -> None:
        """A guard holds `version`, unless somebody overruled it meanwhile; of those held before, only the `stored` ones
        still matter.
        """
        one = Held(by=doubt.guard, reason=doubt.detail, since_s=self._wall_clock())

        def change(now: Control) -> Control:
            if version <= (now.accepted or ""):
                return now
            held = {name: earlier for name, earlier in now.held.items() if name in stored}
            return now.model_copy(update={"held": held | {version: one}})

        await self._note(change)
        if version not in self.control.held:
            return
        log.error(
            "version held by a guard",
            version=version,
            guard=doubt.guard,
            detail=doubt.detail,
            serving=serving,
            to_do=f"look at the run; `:resume` lets it through, `{version}:activate` too and stays on it, "
            "the next version is judged anew (docs/weights.md)",
        )

    async def accept(self, version: str) -> None:
        """The guards let `version` through."""
        if version > (self.control.accepted or ""):
            await self._note(lambda now: now.model_copy(update={"accepted": version}))

    async def _note(self, change: Callable[[Control], Control]) -> None:
        """For what is found out again after a restart: a disk that refuses changes nothing in this process."""
        try:
            await self._change(change, turn=False)
        except OSError as error:
            metrics.STORE_ERRORS.labels("control").inc()
            log.warning("what was decided is not on disk", error=str(error))
            self.control = change(self.control)
            self._measure()

    async def _change(self, change: Callable[[Control], Control], *, turn: bool = True) -> None:
        async with self._lock:
            changed = change(self.control)
            if changed != self.control:
                await asyncio.to_thread(self._file.write, changed)
                self.control = changed
        if turn:
            self.turn += 1
        self._measure()

    def _measure(self) -> None:
        control = self.control
        waiting = control.waiting
        holder = control.pin.by if control.pin is not None else waiting[1].by if waiting is not None else ""
        for by in (*get_args(Pin.model_fields["by"].annotation), *get_args(HeldBy)):
            metrics.PUBLISHING_HELD.labels(by).set(float(by == holder))
