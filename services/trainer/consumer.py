"""Take scored trajectories one at a time, oldest first, and decide what each may teach.

`arrive` gives the next whole trajectory, `judge` decides about it; `take` does both at once. What has to wait for
others (a group) is held in between, and judged when it trains: its lag counts then.

    delivery ─ trained before? ─ forgotten? ─ payload whole? ─ outcome scored? ─ lag ─ preference ─▶ Taken
                   settle           drop           bury             bury         drop  rescore/drop

What is taken, held or dropped is marked consumed at once (admission); with `defer_consumed` what is taken at
`release`, and what is held not before it is taken. A dropped one has no effect to make durable and is settled at once;
a taken one is settled by the loop, after the checkpoint that holds its effect.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from google.protobuf.message import DecodeError
from pydantic import ValidationError

from sao.board.base import Board, VersionRecord
from sao.config.schema import TrainerSection
from sao.invariants import Limits, routing_violations, violations
from sao.lineage import Lineage, UnknownVersionError
from sao.outcome import OUTCOME, Scored
from sao.preference import MissingComponentError, Preference
from sao.routing import RoutingShape
from sao.slots import Slots
from sao.streams.base import FORGOTTEN, Delivery, StreamName, TrajectoryStreams
from sao.streams.dispatch import slot_of
from sao.telemetry.logs import get_logger
from sao.telemetry.traces import OFF, TRACEPARENT, SpanContext, Tracer, context_of
from sao.trajectory import Trajectory
from sao.v1 import trajectory_pb2 as pb
from services.trainer import metrics
from services.trainer.core.staleness import judge_staleness
from services.trainer.core.update import TrajectoryTensors
from services.trainer.drops import Drops

log = get_logger(__name__)

CONSUMER = "trainer"
"""Name in the consumer group: one trainer, so one name, stable across restarts."""
MAX_RESCORES = 2
RESCORE = "rescore"
"""Reason of what was refused only to be scored again: it comes back."""


@dataclass(frozen=True)
class Archived:
    """A trajectory from the archive whose stream entry is gone, to be trained again."""

    trajectory: Trajectory
    outcome: Scored
    routed_experts: bytes = b""
    forgotten: bool = False
    """Its text was erased since: it cannot be trained again, and is dropped."""


@dataclass(frozen=True)
class Arrived:
    """A whole, scored trajectory that nobody has decided about."""

    trajectory: Trajectory
    outcome: Scored
    delivery: Delivery | None
    """None: it came from the archive."""
    size: int
    routed_experts: bytes = b""
    """The record to replay (sao.routing); empty: there is none."""


@dataclass(frozen=True)
class Taken:
    """A trajectory of the current update, as it will be trained."""

    trajectory: Trajectory
    outcome: Scored
    reward: float
    """Under `trained_under`."""
    trained_under: int
    version_lags: Mapping[str, int]
    """In updates, at consumption, of each version that sampled a token of it."""
    lag: int
    """Of its oldest token."""
    tensors: TrajectoryTensors
    size: int
    """Bytes of it in the store, routed experts included; 0 when it came from the archive."""
    consumed_s: float


@dataclass(frozen=True)
class Refused:
    """A delivery that will not train; it has been dealt with."""

    trajectory_id: str
    reason: str


@dataclass(frozen=True)
class Position:
    """Where the trainer stands, for lags."""

    version: str
    """Newest published."""
    update: int


def routes_of(record: bytes, routing: RoutingShape | None) -> torch.Tensor | None:
    """[T - 1, layers, experts per token] of a whole record; None without one, or while replay is off."""
    if routing is None or not record:
        return None
    flat = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    return flat.reshape(-1, routing.layers, routing.per_token)


def tensors_of(
    trajectory: Trajectory, version_lags: Mapping[str, int], reward: float, routes_TLK: torch.Tensor | None
) -> TrajectoryTensors:
    """The trajectory as an update reads it; KeyError when the lag of a version in it is missing."""
    return TrajectoryTensors(
        tokens_T=torch.tensor(trajectory.token_ids, dtype=torch.int64),
        action_mask_T=torch.tensor(trajectory.action_mask),
        logp_rollout_T=torch.tensor(trajectory.logprobs, dtype=torch.float32),
        lag_T=torch.tensor([version_lags[name] if name else 0 for name in trajectory.versions]),
        reward=reward,
        routes_TLK=routes_TLK,
    )


def _entry_of(delivery: Delivery | None) -> str:
    return delivery.entry_id if delivery is not None else ""


def _place_of(trajectory: Trajectory) -> SpanContext:
    return context_of(trajectory.id, trajectory.message.traceparent)


class _DamagedError(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


class Consumer:
    """The trainer's end of the SCORED stream."""

    def __init__(
        self,
        streams: TrajectoryStreams,
        board: Board,
        settings: TrainerSection,
        limits: Limits,
        *,
        epoch: int,
        restored: Iterable[str] = (),
        forgone: Iterable[str] = (),
        undone: Collection[str] = (),
        done: Slots | None = None,
        drops: Drops | None = None,
        defer_consumed: bool = False,
        reward_range: tuple[float, float] = (-math.inf, math.inf),
        clock: Callable[[], float] = time.time,
        tracer: Tracer = OFF,
    ) -> None:
        self._streams = streams
        self._board = board
        self._settings = settings
        self._limits = limits
        self._epoch = epoch
        self._restored = set(restored)
        self._in_hand: dict[str, Delivery] = {}
        self._clock = clock
        self._tracer = tracer
        self._archived: dict[str, Archived] = {}
        """By id, until each is held or dropped."""
        self._versions: dict[str, VersionRecord] = {}
        self._pinned: Preference | None = None
        self._forgone = set(forgone)
        self._undone = undone
        self._defer_consumed = defer_consumed
        self._reward_range = reward_range
        self._unreleased: list[str] = []
        self._drops = Drops() if drops is None else drops
        self.done = Slots() if done is None else done
        """Of trajectories that were trained on or dropped: whatever comes for one of these has come before."""

    async def open(self) -> None:
        """Start, or after an outage start again, at the oldest unsettled delivery."""
        await self._streams.open_consumer(StreamName.SCORED, CONSUMER)
        self._versions = await self._board.versions()

    def requeue(self, archived: Iterable[Archived]) -> None:
        """Train these before anything from the stream."""
        self._archived |= {again.trajectory.id: again for again in archived}

    def know(self, record: VersionRecord) -> None:
        """Note a version this trainer has just published."""
        self._versions[record.name] = record

    @property
    def restored(self) -> list[str]:
        """Ids that the restored checkpoint has trained on and that have not been seen and settled since."""
        return sorted(self._restored)

    @property
    def forgone(self) -> list[str]:
        """Ids in archived steps without effect that were dropped or buried: not to be offered again."""
        return sorted(self._forgone)

    @property
    def dropped(self) -> Counter[str]:
        """Trajectories that did not train, by reason, since the run began."""
        return self._drops.counts

    async def settle(self, trajectory_ids: Iterable[str]) -> int:
        """Acknowledge taken trajectories whose effect is durable; how many entries went.

        Uses each entry's newest delivery: after a rewind the stream accepts no older one. An entry that did not go
        (its group was lost, so it will be delivered anew) is never trained again: it is settled when it comes.
        """
        ids = list(trajectory_ids)
        held = [self._in_hand[trajectory_id] for trajectory_id in ids if trajectory_id in self._in_hand]
        settled = await self._streams.settle(held, CONSUMER, epoch=self._epoch) if held else 0
        if settled < len(held):
            log.warning("entries could not be settled, waiting for them to come again", found=settled, of=len(held))
            self._restored.update(delivery.trajectory_id for delivery in held)
        for trajectory_id in ids:
            self._in_hand.pop(trajectory_id, None)
        return settled

    def begin_update(self) -> None:
        """The next trajectory taken pins the preference anew."""
        self._pinned = None

    @property
    def preference(self) -> Preference | None:
        """Of the update under way; none before its first trajectory."""
        return self._pinned

    async def take(self, position: Position, *, block_ms: int) -> Taken | Refused | None:
        """The next trajectory, or why the next one was refused, or None when none came within `block_ms`."""
        arrived = await self.arrive(block_ms=block_ms)
        return await self.judge(arrived, position) if isinstance(arrived, Arrived) else arrived

    async def arrive(self, *, block_ms: int) -> Arrived | Refused | None:
        """The next trajectory, undecided, or why it was refused, or None when none came within `block_ms`."""
        if again := next(iter(self._archived.values()), None):
            if again.forgotten:
                return await self._drop(again.trajectory, None, FORGOTTEN)
            return Arrived(again.trajectory, again.outcome, None, 0, again.routed_experts)
        deliveries = await self._streams.read(StreamName.SCORED, CONSUMER, count=1, block_ms=block_ms)
        if not deliveries:
            return None
        found = await self._open_up(deliveries[0])
        if isinstance(found, Refused):
            below = context_of(found.trajectory_id, deliveries[0].fields.get(TRACEPARENT, ""))
            self._note_end(below, deliveries[0], found)
        return found

    async def hold(self, arrived: Arrived) -> None:
        """Keep it until it is judged: consumed (with `defer_consumed` not yet), known when an outage delivers it again.

        StreamUnavailableError leaves it as if it had not arrived, so that it arrives again.
        """
        if not self._defer_consumed:
            await self._streams.mark_consumed([arrived.trajectory.id])
        if arrived.delivery is not None:
            self._in_hand.setdefault(arrived.trajectory.id, arrived.delivery)
        self._archived.pop(arrived.trajectory.id, None)

    async def release(self) -> None:
        """With `defer_consumed`: count as consumed what was taken since the last time."""
        await self._streams.mark_consumed(self._unreleased)
        self._unreleased.clear()

    async def drop(self, found: Arrived | Taken, reason: str) -> Refused:
        """Let go of what arrived or was taken and cannot train."""
        delivery = found.delivery if isinstance(found, Arrived) else None
        held = self._in_hand.get(found.trajectory.id, delivery)
        refused = await self._drop(found.trajectory, held, reason)
        self._note_end(_place_of(found.trajectory), held, refused)
        return refused

    async def _open_up(self, delivery: Delivery) -> Arrived | Refused:
        if delivery.trajectory_id in self._in_hand:
            self._in_hand[delivery.trajectory_id] = delivery
            return Refused(delivery.trajectory_id, "in_hand")  # delivered again by a rewind after an outage
        if delivery.trajectory_id in self._restored:
            await self._streams.mark_consumed([delivery.trajectory_id])
            if await self._streams.settle([delivery], CONSUMER, epoch=self._epoch):
                self._restored.discard(delivery.trajectory_id)
            log.info("settled: the restored checkpoint holds its effect", trajectory=delivery.trajectory_id)
            return Refused(delivery.trajectory_id, "already_trained")
        if (reason := self._drops.begun(delivery.trajectory_id, delivery.entry_id)) is not None:
            log.info("finishing a drop that was interrupted", trajectory=delivery.trajectory_id, reason=reason)
            return await self._let_go(delivery.trajectory_id, delivery, reason)
        if FORGOTTEN in delivery.fields:
            return await self._forget(delivery)
        return await self._looked_at(delivery)

    async def _looked_at(self, delivery: Delivery) -> Arrived | Refused:
        try:
            arrived = await self._parse(delivery)
        except _DamagedError as damage:
            return await self._bury(delivery, damage.reason, str(damage))
        if self.slot(arrived.trajectory) in self.done:
            # Only a store that came back with an older file holds such a one.
            return await self._settle_done(delivery)
        return arrived

    async def _settle_done(self, delivery: Delivery) -> Refused:
        await self._streams.mark_consumed([delivery.trajectory_id])
        await self._streams.settle([delivery], CONSUMER, epoch=self._epoch)
        log.warning("settled: its prompt was trained on or dropped before", trajectory=delivery.trajectory_id)
        return Refused(delivery.trajectory_id, "already_done")

    async def _forget(self, delivery: Delivery) -> Refused:
        """Drop what was erased before it could train, all that is known of it being on its entry."""
        fields = delivery.fields
        message = pb.Trajectory(id=delivery.trajectory_id, task=fields.get("task", ""))
        message.ordinal, message.sample = int(fields.get("ordinal", -1)), int(fields.get("sample", 0))
        if message.ordinal < 0:
            # Its payload was damaged: which rollout it was nobody knows, so none is noted as done.
            if self._drops.add(delivery.trajectory_id, delivery.entry_id, FORGOTTEN):
                metrics.count_dropped(Trajectory(message), FORGOTTEN)
            return await self._let_go(delivery.trajectory_id, delivery, FORGOTTEN)
        if self.slot(Trajectory(message)) in self.done:
            return await self._settle_done(delivery)
        return await self._drop(Trajectory(message), delivery, FORGOTTEN)

    def trained(self, taken: Iterable[Taken]) -> None:
        """Note that these have had their effect."""
        for one in taken:
            self.done.add(self.slot(one.trajectory))

    def slot(self, trajectory: Trajectory) -> int:
        """Which wanted rollout it is."""
        return slot_of(trajectory.message.ordinal, trajectory.message.sample, self._limits.samples)

    async def _parse(self, delivery: Delivery) -> Arrived:
        """The trajectory and its outcome; _DamagedError when they are not what they should be."""
        payload = await self._streams.payload(delivery.trajectory_id)
        if payload is None:
            raise _DamagedError(reason="payload_missing", detail="its payload is gone from the store")
        try:
            trajectory = Trajectory.from_bytes(payload)
            outcome = OUTCOME.validate_json(delivery.fields.get("outcome", ""))
        except DecodeError as error:
            raise _DamagedError(reason="payload_damaged", detail=f"not a sao.v1.Trajectory: {error}") from error
        except ValidationError as error:
            raise _DamagedError(
                reason="outcome_damaged", detail=f"field `outcome`: {error.errors()[0]['msg']}"
            ) from error
        if trajectory.id != delivery.trajectory_id:
            raise _DamagedError(reason="payload_damaged", detail=f"the payload is that of {trajectory.id!r}")
        if {span.version for s in trajectory.message.segments for span in s.versions} - self._versions.keys():
            self._versions = await self._board.versions()
        # Ingress has checked this once; a store that damaged the bytes since must not reach the weights.
        broken = violations(trajectory.message, self._limits, self._versions)
        if broken:
            raise _DamagedError(reason="payload_damaged", detail="; ".join(map(str, broken)))
        if not isinstance(outcome, Scored):
            raise _DamagedError(reason="not_scored", detail=f"outcome is {outcome.kind}, only `scored` trains")
        routed_experts = await self._routed_experts(trajectory)
        return Arrived(trajectory, outcome, delivery, len(payload) + len(routed_experts), routed_experts)

    async def _routed_experts(self, trajectory: Trajectory) -> bytes:
        """The record to replay; empty while replay is off, or where the trajectory was made while it was."""
        if self._limits.routing is None or not trajectory.message.routed_experts_key:
            return b""
        record = await self._streams.routed_experts(trajectory.id)
        if record is None:
            raise _DamagedError(reason="payload_missing", detail="its routed experts are gone from the store")
        if broken := routing_violations(trajectory.message, record, self._limits):
            raise _DamagedError(reason="payload_damaged", detail="; ".join(map(str, broken)))
        return record

    async def judge(self, arrived: Arrived, position: Position) -> Taken | Refused:
        """Whether it trains now, with which reward and which of its tokens; what is refused has been dealt with."""
        delivery = self._in_hand.get(arrived.trajectory.id, arrived.delivery)
        found = await self._judge(arrived, position)
        self._note_end(_place_of(arrived.trajectory), delivery, found)
        return found

    async def _judge(self, arrived: Arrived, position: Position) -> Taken | Refused:
        trajectory, outcome = arrived.trajectory, arrived.outcome
        delivery = self._in_hand.get(trajectory.id, arrived.delivery)
        try:
            lags = self._lags(trajectory, position)
        except UnknownVersionError as error:
            log.warning("no lag can be told", trajectory=trajectory.id, reason=str(error))
            return await self._drop(trajectory, delivery, "lineage")
        routes_TLK = routes_of(arrived.routed_experts, self._limits.routing)
        tensors = tensors_of(trajectory, lags, outcome.value, routes_TLK)
        stale = judge_staleness(
            tensors.lag_T, tensors.action_mask_T, self._settings.max_lag, self._settings.stale_policy
        )
        masked = int(stale.stale_mask_T.sum())
        if stale.drop:
            return await self._drop(trajectory, delivery, "stale")
        judged = await self._reward(trajectory, outcome, delivery)
        if isinstance(judged, Refused):
            return judged
        reward, trained_under, self._pinned = judged
        lowest, highest = self._reward_range
        if not lowest <= reward <= highest:
            log.warning("reward outside the algorithm's range", trajectory=trajectory.id, reward=reward)
            return await self._drop(trajectory, delivery, "reward_range")
        await self.hold(arrived)
        if self._defer_consumed:
            self._unreleased.append(trajectory.id)
        if masked:
            metrics.count_masked(trajectory, masked)
        tensors = replace(tensors, reward=reward)
        size = arrived.size
        return Taken(trajectory, outcome, reward, trained_under, lags, stale.lag, tensors, size, self._clock())

    async def _reward(
        self, trajectory: Trajectory, outcome: Scored, delivery: Delivery | None
    ) -> tuple[float, int, Preference | None] | Refused:
        """(reward, preference version it is under, the update's preference), by trainer.preference_policy.

        Only a trajectory that is taken pins: one that goes back for scoring comes again under what is current then.
        """
        pinned = self._pinned or await self._board.preference()
        policy = self._settings.preference_policy
        if pinned is None or outcome.scored_under == pinned.version or policy == "keep":
            return outcome.value, outcome.scored_under, pinned
        if policy == "drop":
            return await self._drop(trajectory, delivery, "preference")
        try:
            return outcome.value_under(pinned.document), pinned.version, pinned
        except MissingComponentError as error:
            return await self._rescore(trajectory, delivery, str(error))
        except ValueError as error:
            log.warning("re-weighting gave no number", trajectory=trajectory.id, reason=str(error))
            return await self._drop(trajectory, delivery, "preference")

    async def _rescore(self, trajectory: Trajectory, delivery: Delivery | None, why: str) -> Refused:
        """Back to the reward service for what only this preference reads, at most MAX_RESCORES times."""
        rescores = int(delivery.fields.get("rescores", "0")) if delivery is not None else MAX_RESCORES
        if delivery is None or rescores >= MAX_RESCORES:
            log.warning("dropped: the preference's components are missing", trajectory=trajectory.id, reason=why)
            return await self._drop(trajectory, delivery, "preference")
        fields = {key: value for key, value in delivery.fields.items() if key != "outcome"}
        await self._streams.move(delivery, CONSUMER, StreamName.TRAJECTORIES, {**fields, "rescores": str(rescores + 1)})
        self._in_hand.pop(trajectory.id, None)
        metrics.RESCORED.inc()
        log.info("sent back for scoring", trajectory=trajectory.id, reason=why, rescores=rescores + 1)
        return Refused(trajectory.id, RESCORE)

    async def _drop(self, trajectory: Trajectory, delivery: Delivery | None, reason: str) -> Refused:
        if self._drops.add(trajectory.id, _entry_of(delivery), reason):
            metrics.count_dropped(trajectory, reason)
        # Named before it goes: once it is settled, nothing else tells what became of it.
        log.info("dropped", trajectory=trajectory.id, reason=reason, action_tokens=trajectory.action_count)
        self.done.add(self.slot(trajectory))
        return await self._let_go(trajectory.id, delivery, reason)

    async def _let_go(self, trajectory_id: str, delivery: Delivery | None, reason: str) -> Refused:
        await self._streams.mark_consumed([trajectory_id])
        gone = delivery is None or await self._streams.settle([delivery], CONSUMER, epoch=self._epoch) > 0
        if delivery is None or trajectory_id in self._undone:
            self._forgone.add(trajectory_id)
        self._in_hand.pop(trajectory_id, None)
        self._archived.pop(trajectory_id, None)
        if gone:
            self._drops.done(trajectory_id, _entry_of(delivery))
        return Refused(trajectory_id, reason)

    async def _bury(self, delivery: Delivery, reason: str, detail: str) -> Refused:
        if self._drops.add(delivery.trajectory_id, delivery.entry_id, reason, buried=True):
            metrics.BURIED.labels(reason).inc()
        if await self._streams.bury(delivery, CONSUMER, f"{reason}: {detail}"):
            self._drops.done(delivery.trajectory_id, delivery.entry_id)
        if delivery.trajectory_id in self._undone:
            self._forgone.add(delivery.trajectory_id)
        log.error("buried", trajectory=delivery.trajectory_id, reason=reason, detail=detail)
        return Refused(delivery.trajectory_id, reason)

    def _note_end(self, below: SpanContext, delivery: Delivery | None, found: Taken | Refused) -> None:
        """In the trajectory's trace: how long its entry waited here, and what was decided about it."""
        start_ns = delivery.added_ms * 1_000_000 if delivery is not None else None
        span = self._tracer.span("consume", below, start_ns=start_ns)
        match found:
            case Taken():
                span.set(outcome="taken", lag=found.lag)
            case Refused():
                span.set(outcome="refused", reason=found.reason)
        span.end()

    def _lags(self, trajectory: Trajectory, position: Position) -> dict[str, int]:
        lineage = Lineage(self._versions)
        names = sorted({name for name in trajectory.versions if name})
        return {name: lineage.lag(name, position.version, position.update) for name in names}
