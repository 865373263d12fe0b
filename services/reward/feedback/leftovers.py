"""What still waits in a run whose file asks for no feedback any more goes back for scoring: nothing waits for ever."""

from __future__ import annotations

import asyncio
import time

from sao.config.schema import FeedbackSection
from sao.streams.base import StreamError, StreamName
from sao.streams.room import WaitingRoom
from sao.telemetry.logs import get_logger
from services.reward import metrics
from services.reward.feedback.desk import VALUE, rest_of

LOOK_EVERY_S = 5.0
"""A replica that still runs with the older file may go on parking."""
KEPT_MS = int(FeedbackSection().deadline_s * 1000)
"""How long an answer stays that nothing here waits for: such a replica may park its trajectory yet."""
_AT_ONCE = 256

log = get_logger(__name__)


class Leftovers:
    """Stands where the desk would be; any number of replicas may do so at once, each step is taken once."""

    def __init__(self, room: WaitingRoom) -> None:
        self._room = room

    async def run(self) -> None:
        """Until cancelled; a store that does not answer is asked again the next time."""
        while True:
            try:
                await self.send_back()
                await self.forget()
            except StreamError as error:
                metrics.STORE_RETRIES.inc()
                log.warning("the waiting room could not be looked at", error=str(error))
            await asyncio.sleep(LOOK_EVERY_S)

    async def send_back(self) -> None:
        """Hand everything that waits to the scorers, with its answer where there is one; an answer is never lost."""
        while waiting := await self._room.waiting(count=_AT_ONCE):
            gone, now_ms = 0, time.time_ns() // 1_000_000
            for one in waiting:
                found = await self._room.find(one.trajectory_id)
                fields = rest_of(one) | ({VALUE: repr(found[1].value)} if found is not None else {})
                gone += await self._room.join(
                    one, fields, now_ms=now_ms, answered=found is not None, to=StreamName.TRAJECTORIES
                )
            log.warning("sent back for scoring: the run file has no [reward.feedback] any more", trajectories=gone)
            if gone == 0:
                return

    async def forget(self) -> None:
        """Let go of answers that came to nothing, and of those that were joined."""
        before_ms = time.time_ns() // 1_000_000 - KEPT_MS
        await self._room.forget(kept_before_ms=before_ms, joined_before_ms=before_ms, remembered=_AT_ONCE)
