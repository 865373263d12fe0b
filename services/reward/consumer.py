"""From `trajectories` to `scored`: read, score, hand over in one fenced step.

| outcome | what happens to the delivery |
|---|---|
| scored | moved to SCORED with the outcome |
| all but the feedback is there | parked, out of admission, until it comes (services.reward.feedback) |
| invalid | buried at once, with the reason |
| timeout, infra_failed | left pending, claimed again after `claim_idle_s`; buried with the reason at `max_deliveries` |

At most `batch` deliveries are being worked on. One that waits for nothing but the run file's scorers does not count:
these have a bound of their own (the largest `concurrency`), which holds up only what reads such a scorer too. So a
judge that hangs never stands in the way of a preference that does not ask it. A delivery is in flight once: when this
consumer claims what it is still working on, the newer delivery takes the older one's place (the older one is fenced by
then).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from sao.config.schema import RewardSection
from sao.outcome import OUTCOME, InfraFailed, Invalid, RewardOutcome, Scored, TimedOut
from sao.streams.base import Delivery, StreamName, TrajectoryStreams
from sao.telemetry.health import Health
from sao.telemetry.logs import get_logger
from sao.telemetry.traces import OFF, Span, Tracer
from services.reward import metrics
from services.reward.feedback.desk import Desk
from services.reward.retry import patiently
from services.reward.scorer import TrajectoryScorer, Unfinished
from services.reward.tracing import begun, note_outcome

BLOCK_MS = 100
"""Longest wait for one read, and so for noticing the stop."""
HOUSEKEEPING_S = 1.0
"""Longest time between two looks at the queue's depth and at abandoned deliveries."""
SOURCE = StreamName.TRAJECTORIES

log = get_logger(__name__)


class Consumer:
    """One member of the consumer group on the trajectories stream."""

    def __init__(
        self,
        streams: TrajectoryStreams,
        scorer: TrajectoryScorer,
        settings: RewardSection,
        health: Health,
        *,
        desk: Desk | None = None,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer = OFF,
    ) -> None:
        self._streams = streams
        self._desk = desk
        self._scorer = scorer
        self._settings = settings
        self._name = settings.consumer
        self._health = health
        self._clock = clock
        self._tracer = tracer
        self._in_flight: dict[str, Delivery] = {}
        self._waiting: set[str] = set()
        self._freed = asyncio.Event()
        self._next_housekeeping = clock()

    async def run(self, stop: asyncio.Event) -> None:
        """Score until `stop`, then finish what is in flight; an error that patience did not cure escapes."""
        await patiently(lambda: self._streams.open_consumer(SOURCE, self._name))
        self._health.set_ready(True)
        self._health.idle("no trajectory is waiting")
        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                for delivery in await self._next():
                    self._begin(group, delivery)
        self._health.set_ready(False)

    async def _next(self) -> Sequence[Delivery]:
        """New deliveries, as many as there is room for; waits a little when there are none."""
        found: list[Delivery] = []
        if self._clock() >= self._next_housekeeping:
            self._next_housekeeping = self._clock() + min(HOUSEKEEPING_S, self._settings.claim_idle_s / 2)
            found = await self._housekeep()
        room = self._room() - len(found)
        if room > 0:
            block_ms = 0 if found else BLOCK_MS
            read = await patiently(lambda: self._streams.read(SOURCE, self._name, count=room, block_ms=block_ms))
            return [*found, *read]
        if not found:
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), BLOCK_MS / 1000)
        return found

    def _room(self) -> int:
        if self._scorer.asks_scorers and len(self._waiting) >= self._scorer.most_waiting:
            return 0
        return self._settings.batch - (len(self._in_flight) - len(self._waiting))

    async def _housekeep(self) -> list[Delivery]:
        depth = await patiently(lambda: self._streams.depth(SOURCE))
        metrics.QUEUE.set(depth.length)
        metrics.QUEUE_AGE.set(depth.oldest_age_s)
        await self._scorer.look()
        room = self._room()
        if room <= 0:
            return []
        idle_ms = int(self._settings.claim_idle_s * 1000)
        return await patiently(lambda: self._streams.claim(SOURCE, self._name, idle_ms=idle_ms, count=room))

    def _begin(self, group: asyncio.TaskGroup, delivery: Delivery) -> None:
        known = delivery.trajectory_id in self._in_flight
        self._in_flight[delivery.trajectory_id] = delivery
        if known:
            return
        group.create_task(self._handle(delivery))
        self._note_work()

    async def _handle(self, delivery: Delivery) -> None:
        try:
            with begun(self._tracer, delivery) as span:
                await self._score(delivery, span)
            self._health.progress()
        finally:
            del self._in_flight[delivery.trajectory_id]
            self._waiting.discard(delivery.trajectory_id)
            self._freed.set()
            self._note_work()

    async def _score(self, delivery: Delivery, span: Span) -> None:
        outcome = await self._outcome(delivery)
        note_outcome(span, outcome)
        if isinstance(outcome, Unfinished):
            await self._park(delivery.trajectory_id, outcome)
        else:
            metrics.OUTCOMES.labels(outcome.kind).inc()
            await self._dispose(self._in_flight[delivery.trajectory_id], outcome)

    def _note_waiting(self, trajectory_id: str) -> None:
        self._waiting.add(trajectory_id)
        self._freed.set()
        metrics.WAITING.set(len(self._waiting))

    def _note_work(self) -> None:
        metrics.IN_FLIGHT.set(len(self._in_flight))
        metrics.WAITING.set(len(self._waiting))
        if self._in_flight:
            self._health.working(f"scoring {len(self._in_flight)} trajectories")
        else:
            self._health.idle("no trajectory is waiting")

    async def _outcome(self, delivery: Delivery) -> RewardOutcome | Unfinished:
        if delivery.attempt > self._settings.max_deliveries:
            return Invalid(reason=f"delivered {delivery.attempt} times, and no delivery came to an outcome")
        payload = await patiently(lambda: self._streams.payload(delivery.trajectory_id))
        if payload is None:
            return Invalid(reason="its payload is gone from the store")
        given = self._desk.given(delivery) if self._desk is not None else {}
        return await self._scorer.score(payload, given, on_waiting=lambda: self._note_waiting(delivery.trajectory_id))

    async def _park(self, trajectory_id: str, unfinished: Unfinished) -> None:
        delivery = self._in_flight[trajectory_id]
        assert self._desk is not None, "nothing comes late without a desk"
        if await self._desk.park(delivery, self._name, unfinished):
            log.info("trajectory waits for feedback", trajectory=trajectory_id)
        else:
            self._note_lost(delivery)

    async def _dispose(self, delivery: Delivery, outcome: RewardOutcome) -> None:
        match outcome:
            case Scored():
                fields = {**delivery.fields, "outcome": OUTCOME.dump_json(outcome).decode()}
                moved = await patiently(
                    lambda: self._streams.move(delivery, self._name, StreamName.SCORED, fields),
                )
                if not moved:
                    self._note_lost(delivery)
                    return
                log.info(
                    "trajectory scored",
                    trajectory=delivery.trajectory_id,
                    value=outcome.value,
                    preference=outcome.scored_under,
                )
            case Invalid():
                await self._bury(delivery, outcome.kind, outcome.reason)
            case TimedOut() | InfraFailed():
                reason = _reason(outcome)
                if delivery.attempt >= self._settings.max_deliveries:
                    await self._bury(delivery, outcome.kind, f"{reason}; delivery {delivery.attempt} was the last")
                    return
                log.warning(
                    "scoring failed, will be tried again",
                    trajectory=delivery.trajectory_id,
                    attempt=delivery.attempt,
                    reason=reason,
                )

    async def _bury(self, delivery: Delivery, kind: str, reason: str) -> None:
        if not await patiently(lambda: self._streams.bury(delivery, self._name, f"{kind}: {reason}")):
            self._note_lost(delivery)
            return
        metrics.BURIED.labels(kind).inc()
        log.error("trajectory buried", trajectory=delivery.trajectory_id, kind=kind, reason=reason)

    def _note_lost(self, delivery: Delivery) -> None:
        metrics.LOST.inc()
        log.warning(
            "delivery was lost to another consumer", trajectory=delivery.trajectory_id, attempt=delivery.attempt
        )


def _reason(outcome: TimedOut | InfraFailed) -> str:
    if isinstance(outcome, TimedOut):
        return f"{outcome.component} took longer than {outcome.after_s:g} s"
    return f"{outcome.component}: {outcome.reason}"
