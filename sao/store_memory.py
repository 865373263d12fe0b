"""How full the store is, what fills it and what to do about it, in the same words wherever it is told.

| pressure | from | what happens |
|---|---|---|
| ROOM | 0 % | everything goes on |
| MARK | `redis.back_pressure_at` | ingest refuses and leases nothing, workers keep what they finish in their spools; the rest drains |
| FULL | 100 % | the store itself refuses what would add to it; what drains it, and the board, still goes on |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from sao.config.schema import RedisSection
from sao.streams.base import DeadEvent, DeadTotals, StreamDepth, StreamName, TrajectoryStreams
from sao.streams.room import RoomUse

_MIB = 2**20
_MUCH = 0.25
"""Dead letters are named as the cause from this share of the store's bound on."""


class Pressure(IntEnum):
    """How full the store is, by what that means."""

    ROOM = 0
    MARK = 1
    FULL = 2

    @property
    def label(self) -> str:
        """For the metrics."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class StoreUse:
    """The used share of the store's memory bound, and what of the run lies in it."""

    share: float
    trajectories: StreamDepth
    scored: StreamDepth
    unconsumed: int
    dead: DeadTotals
    feedback: RoomUse = field(default_factory=RoomUse)
    """What waits for feedback; it is not counted in `unconsumed`."""


async def read_use(streams: TrajectoryStreams) -> StoreUse:
    """What lies in the store now; StreamUnavailableError while it does not answer."""
    return StoreUse(
        share=await streams.memory_fraction(),
        trajectories=await streams.depth(StreamName.TRAJECTORIES),
        scored=await streams.depth(StreamName.SCORED),
        unconsumed=await streams.unconsumed(),
        dead=await streams.dead_totals(),
        feedback=await streams.room.use(),
    )


def pressure(share: float, settings: RedisSection) -> Pressure:
    """What this used share means."""
    if share >= 1.0:
        return Pressure.FULL
    return Pressure.MARK if share >= settings.back_pressure_at else Pressure.ROOM


def contents(use: StoreUse) -> str:
    """Who has how much of it, in one line."""
    waiting, scored = use.trajectories, use.scored
    parked = f"{use.feedback.waiting} that wait for feedback; " if use.feedback.waiting else ""
    return (
        f"{waiting.length} trajectories on the way through the reward service, oldest {waiting.oldest_age_s:.0f} s; "
        f"{scored.length} scored ones, oldest {scored.oldest_age_s:.0f} s, {scored.pending} of them with the trainer "
        f"until its next checkpoint; {parked}dead letters {use.dead.size / _MIB:.1f} MiB"
    )


def advice(use: StoreUse, settings: RedisSection) -> str:
    """Where to look first, and how to give the store more memory."""
    bound = "or raise its bound: CONFIG SET maxmemory at once, redis.maxmemory_mb (your own store: its file) for good"
    return f"{_cause(use, settings)}; {bound}"


def _cause(use: StoreUse, settings: RedisSection) -> str:
    waiting, scored = use.trajectories.length, use.scored
    if use.dead.size >= _MUCH * settings.maxmemory_mb * _MIB:
        return "dead letters take much of it: `sao dead list`, then requeue or drop them"
    if use.feedback.waiting > max(waiting, scored.length):
        return "most of it waits for feedback: reward.feedback.waiting_max and .deadline_s bound that"
    if waiting > scored.length:
        return "the reward service does not keep up: is it running, what does its log say"
    if scored.length == 0:
        return "nothing of this run fills it: look for other keys in this store"
    if 2 * scored.pending > scored.length:
        return "most of it waits for the trainer's next checkpoint: its log, checkpoint.unacked_mb_max"
    return "the trainer does not keep up: is it running, what does its log say"


def waiting_dead(totals: DeadTotals) -> Mapping[str, int]:
    """Letters that are there now, by kind of reason; kinds without any are left out."""
    left = dict(totals.counts.get(DeadEvent.BURIED, {}))
    for event in (DeadEvent.REQUEUED, DeadEvent.DROPPED, DeadEvent.FORGOTTEN):
        for kind, count in totals.counts.get(event, {}).items():
            left[kind] = left.get(kind, 0) - count
    return {kind: count for kind, count in sorted(left.items()) if count > 0}
