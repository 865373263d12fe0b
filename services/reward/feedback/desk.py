"""Parks what is scored but for its feedback, joins the feedback that comes, and disposes of what none came for.

Any number of desks work on one room: each of its steps is taken once, whoever is first, and what a killed desk has left
lies in the room for the next sweep. An answer that was taken is joined by whoever took it, or else by a sweep.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from sao.config.schema import FeedbackSection
from sao.outcome import OUTCOME, InfraFailed, Scored, TimedOut
from sao.preference import MissingComponentError, Preference
from sao.streams.base import Delivery, StreamError, StreamName
from sao.streams.room import Feedback, Heard, RoomUse, Waiting, WaitingRoom
from sao.telemetry.logs import get_logger
from sao.telemetry.traces import OFF, Tracer
from services.reward import metrics
from services.reward.feedback.asking import asked
from services.reward.retry import patiently
from services.reward.scorer import Evaluated, Unfinished, outcome_of, weighed
from services.reward.tracing import note_feedback

SWEEP_S = 0.5
"""Longest time between an answer that another replica has taken, or a deadline, and what follows from it."""
_AT_ONCE = 256
VALUE, PARTIAL = "feedback", "partial"
"""Fields of an entry: the value that was joined, and while it waits its other components and how they were judged."""

log = get_logger(__name__)


class Desk:
    """The feedback of one run; `current_preference` asks the board, `wall_clock` gives Unix seconds."""

    def __init__(
        self,
        room: WaitingRoom,
        current_preference: Callable[[], Awaitable[Preference | None]],
        settings: FeedbackSection,
        *,
        wall_clock: Callable[[], float] = time.time,
        tracer: Tracer = OFF,
    ) -> None:
        self._room = room
        self._current_preference = current_preference
        self.settings = settings
        self._wall_clock = wall_clock
        self._tracer = tracer

    def given(self, delivery: Delivery) -> Mapping[str, float]:
        """The component of a trajectory that need not wait: it was joined before, or is not asked for."""
        if VALUE in delivery.fields:
            return {self.settings.component: float(delivery.fields[VALUE])}
        if self.asks_for(delivery.trajectory_id):
            return {}
        assert self.settings.unasked is not None, "the schema wants it where the share is below 1"
        return {self.settings.component: self.settings.unasked}

    def asks_for(self, trajectory_id: str) -> bool:
        """Whether feedback on this trajectory is wanted at all."""
        return asked(trajectory_id, self.settings.share)

    async def park(self, delivery: Delivery, consumer: str, unfinished: Unfinished) -> bool:
        """Have it wait; False when the delivery was lost. What was answered already is joined at once."""
        fields = {**delivery.fields, PARTIAL: json.dumps([unfinished.components, unfinished.judged])}
        now_ms = self._now_ms()
        parked = await patiently(lambda: self._room.park(delivery, consumer, fields, now_ms=now_ms))
        if parked:
            metrics.FEEDBACK_PARKED.inc()
            await patiently(lambda: self._join_if_answered(delivery.trajectory_id))
        return parked

    async def answer(self, trajectory_id: str, value: float, *, author: str, reason: str) -> Heard:
        """Take an answer, and join it if its trajectory waits: JOINED then. StreamError: perhaps it was taken."""
        feedback = Feedback(value=value, at_ms=self._now_ms(), author=author, reason=reason)
        heard = await self._room.answer(trajectory_id, feedback, kept_max=self.settings.waiting_max)
        if heard is not Heard.WAITING:
            return heard
        try:
            await self._join_if_answered(trajectory_id)
        except StreamError as error:
            log.warning("an answer waits for the next sweep to be joined", trajectory=trajectory_id, error=str(error))
        return Heard.JOINED

    async def waiting(self, *, count: int) -> list[Waiting]:
        """Those that wait longest."""
        return await self._room.waiting(count=count)

    async def use(self) -> RoomUse:
        """What lies in the room."""
        return await self._room.use()

    async def run(self) -> None:
        """Sweep until cancelled; a store that does not answer is asked again the next time."""
        while True:
            try:
                await self.sweep()
            except StreamError as error:
                metrics.STORE_RETRIES.inc()
                log.warning("the waiting room could not be swept", error=str(error))
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> None:
        """Join what is answered, dispose of what is overdue, forget old answers, show what is there."""
        for waiting, feedback in await self._room.answered(count=_AT_ONCE):
            await self._join(waiting, feedback)
        while await self._expire():
            pass
        # Answers whose trajectory never comes to wait outlive the wait of one that would.
        horizon_ms = self._now_ms() - int(self.settings.deadline_s * 1000)
        unused = await self._room.forget(
            kept_before_ms=horizon_ms, joined_before_ms=horizon_ms, remembered=self.settings.waiting_max
        )
        if unused:
            metrics.FEEDBACK_UNUSED.inc(unused)
            log.warning("feedback came to nothing: its trajectories did not wait for it", answers=unused)
        use = await self._room.use()
        metrics.FEEDBACK_WAITING.set(use.waiting)
        metrics.FEEDBACK_KEPT.set(use.kept)
        metrics.FEEDBACK_OLDEST.set(0 if use.oldest_ms is None else max(self._now_ms() - use.oldest_ms, 0) / 1000)

    async def _join_if_answered(self, trajectory_id: str) -> None:
        found = await self._room.find(trajectory_id)
        if found is not None:
            await self._join(*found)

    async def _join(self, waiting: Waiting, feedback: Feedback) -> None:
        """The order is the scorer's: note the time, then read the preference."""
        started_s = self._wall_clock()
        preference = await self._current_preference()
        if preference is None:  # the board was emptied: it gets its preferences back within a second
            return
        outcome = _weighed(waiting, {self.settings.component: feedback.value}, preference, started_s)
        now_ms = self._now_ms()
        fields = {**rest_of(waiting), VALUE: repr(feedback.value)}
        if outcome is None:
            await self._back_for_scoring(waiting, fields, now_ms=now_ms, answered=True)
            return
        if isinstance(outcome, InfraFailed):
            reason = f"{outcome.kind}: {outcome.component}: {outcome.reason}"
            if await self._room.bury(_unparked(waiting), reason, now_ms=now_ms, answered=True):
                self._note_end(waiting, outcome.kind, reason)
            return
        fields |= {"outcome": OUTCOME.dump_json(outcome).decode()}
        if not await self._room.join(waiting, fields, now_ms=now_ms):
            return
        note_feedback(self._tracer, waiting, "joined")
        waited_s = max(feedback.at_ms - waiting.since_ms, 0) / 1000
        metrics.OUTCOMES.labels(outcome.kind).inc()
        metrics.FEEDBACK_JOINED.inc()
        metrics.FEEDBACK_DELAY.observe(waited_s)
        log.info(
            "feedback joined",
            trajectory=waiting.trajectory_id,
            feedback=feedback.value,
            author=feedback.author,
            reason=feedback.reason,
            value=outcome.value,
            preference=outcome.scored_under,
            waited_s=waited_s,
        )

    async def _expire(self) -> bool:
        """Dispose of the oldest that are beyond the deadline or the bound; whether there may be more."""
        surplus = (await self._room.use()).waiting - self.settings.waiting_max
        oldest_ms = self._now_ms() - int(self.settings.deadline_s * 1000)
        disposed = 0
        page = await self._room.waiting(count=_AT_ONCE)
        for number, waiting in enumerate(page):
            if waiting.since_ms <= oldest_ms:
                disposed += await self._dispose(waiting, "deadline")
            elif number < surplus:
                disposed += await self._dispose(waiting, "bound")
        return disposed == _AT_ONCE

    async def _dispose(self, waiting: Waiting, why: str) -> bool:
        """By `on_expiry`; False when an answer came in the last moment, or another desk was faster."""
        started_s, now_ms = self._wall_clock(), self._now_ms()
        outcome = TimedOut(component=self.settings.component, after_s=(now_ms - waiting.since_ms) / 1000)
        reason = f"{outcome.kind}: {outcome.component} did not come within {outcome.after_s:.1f} s"
        if why == "bound":
            reason += f", and {self.settings.waiting_max} younger ones wait (reward.feedback.waiting_max)"
        preference = await self._current_preference()
        if self._does_without(preference):
            assert preference is not None
            gone = await self._hand_on_without(waiting, preference, started_s, now_ms=now_ms)
        else:
            gone = await self._room.bury(_unparked(waiting), reason, now_ms=now_ms)
        if gone:
            buried = not self._does_without(preference)
            metrics.FEEDBACK_EXPIRED.labels(why, "dropped" if buried else "scored_without").inc()
            self._note_end(waiting, outcome.kind, reason, buried=buried)
        return gone

    def _does_without(self, preference: Preference | None) -> bool:
        """Whether what expires is wanted without its feedback: the current preference must not read it."""
        if self.settings.on_expiry == "drop" or preference is None:
            return False
        return self.settings.component not in preference.document.components

    async def _hand_on_without(
        self, waiting: Waiting, preference: Preference, started_s: float, *, now_ms: int
    ) -> bool:
        outcome = _weighed(waiting, {}, preference, started_s)
        if not isinstance(outcome, Scored):
            return await self._back_for_scoring(waiting, rest_of(waiting), now_ms=now_ms, answered=False)
        fields = {**rest_of(waiting), "outcome": OUTCOME.dump_json(outcome).decode()}
        return await self._room.join(waiting, fields, now_ms=now_ms, answered=False)

    async def _back_for_scoring(
        self, waiting: Waiting, fields: Mapping[str, str], *, now_ms: int, answered: bool
    ) -> bool:
        """To the scorers once more: the preference reads what was not computed, or judged under another rubric."""
        to = StreamName.TRAJECTORIES
        gone = await self._room.join(waiting, fields, now_ms=now_ms, answered=answered, to=to)
        if gone:
            note_feedback(self._tracer, waiting, "back_for_scoring")
            log.info("scored once more, the preference has changed while it waited", trajectory=waiting.trajectory_id)
        return gone

    def _note_end(self, waiting: Waiting, kind: str, reason: str, *, buried: bool = True) -> None:
        note_feedback(self._tracer, waiting, "buried" if buried else "done_without")
        metrics.OUTCOMES.labels(kind).inc()
        if buried:
            metrics.BURIED.labels(kind).inc()
        log.warning("feedback did not lead to a reward", trajectory=waiting.trajectory_id, buried=buried, reason=reason)

    def _now_ms(self) -> int:
        return int(self._wall_clock() * 1000)


def _weighed(
    waiting: Waiting, given: Mapping[str, float], preference: Preference, started_s: float
) -> Scored | InfraFailed | None:
    """Its outcome with these beside what was computed before it waited; None: only scoring it again can tell."""
    components, judged = json.loads(waiting.fields[PARTIAL])
    try:
        found = weighed({**components, **given}, judged, preference.document)
    except MissingComponentError:
        return None
    return outcome_of(found, preference, started_s) if isinstance(found, Evaluated) else found


def rest_of(waiting: Waiting) -> dict[str, str]:
    """What the entry carried before it was parked."""
    return {name: value for name, value in waiting.fields.items() if name != PARTIAL}


def _unparked(waiting: Waiting) -> Waiting:
    """As a letter carries it: requeued, it is scored from the beginning."""
    return replace(waiting, fields=rest_of(waiting))
