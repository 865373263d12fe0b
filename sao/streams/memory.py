"""The streams inside one process: the twin that unit tests use, with a clock and a memory bound of their own."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sao.board.memory import MemoryBoard
from sao.ids import uuid7_unix_ms
from sao.slots import Slots
from sao.streams.base import (
    FORGOTTEN,
    LETTER_BYTES,
    AppendStatus,
    DeadEvent,
    DeadLetter,
    DeadTotals,
    Delivery,
    Entry,
    Erased,
    RequeueStatus,
    StreamDepth,
    StreamFullError,
    StreamName,
    StreamUnavailableError,
)
from sao.streams.dispatch import Dispatch, slot_of
from sao.streams.memory_room import Around, MemoryRoom

HOUR_MS = 3_600_000


@dataclass(slots=True)
class _Item:
    trajectory_id: str
    fields: Mapping[str, str]
    added_ms: int
    consumer: str | None = None
    attempt: int = 0
    delivered_ms: int = 0


@dataclass(slots=True)
class _Stream:
    items: dict[str, _Item] = field(default_factory=dict)
    rewind: dict[str, list[str]] = field(default_factory=dict)


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryStreams:
    """sao.streams.base.TrajectoryStreams on plain dictionaries.

    `board` supplies the trainer epoch that fences `settle` (none: one that is claimed); `capacity_bytes` bounds the
    stored payloads; `samples` is how many rollouts the run wants of one ordinal; `dead_bytes` bounds the dead letters.
    """

    def __init__(
        self,
        board: MemoryBoard | None = None,
        *,
        samples: int = 1,
        horizon_h: int = 24,
        capacity_bytes: int | None = None,
        dead_bytes: int = 2**26,
        clock_ms: Callable[[], int] = _wall_ms,
    ) -> None:
        self.dispatch = Dispatch()
        self.samples = samples
        self._board = board or MemoryBoard(claimed=True)
        self._horizon_h = horizon_h
        self._capacity = capacity_bytes
        self._clock_ms = clock_ms
        self._numbers = itertools.count(1)
        self._streams = {name: _Stream() for name in StreamName}
        self._payloads: dict[str, bytes] = {}
        self._routed_experts: dict[str, bytes] = {}
        self._seen: dict[int, set[str]] = {}
        self._unconsumed: set[str] = set()
        self._dead_bytes = dead_bytes
        self._dead: dict[str, DeadLetter] = {}
        self._dead_counts: dict[DeadEvent, Counter[str]] = {}
        self._arrived = asyncio.Condition()
        self._room = MemoryRoom(
            Around(
                take=self._take,
                release=self._unconsumed.discard,
                admitted=lambda trajectory_id: trajectory_id in self._unconsumed,
                seen=self._seen_before,
                hand_on=self._add,
                bury=self._bury_waiting,
            )
        )

    @property
    def room(self) -> MemoryRoom:
        return self._room

    async def ping(self) -> None:
        """Always there."""

    async def memory_fraction(self) -> float:
        if self._capacity is None:
            return 0.0
        stored = itertools.chain(self._payloads.values(), self._routed_experts.values())
        return sum(map(len, stored)) / self._capacity

    async def append(
        self,
        trajectory_id: str,
        payload: bytes,
        *,
        ordinal: int,
        sample: int,
        fields: Mapping[str, str],
        routed_experts: bytes = b"",
    ) -> AppendStatus:
        self.require_claimed()
        slot = slot_of(ordinal, sample, self.samples)
        hour = uuid7_unix_ms(trajectory_id) // HOUR_MS
        if self._seen_before(trajectory_id):
            return AppendStatus.DUPLICATE
        if self.dispatch.done(slot):
            return AppendStatus.SUPERSEDED
        await self._refuse_when_full(trajectory_id)
        self._forget_old_ids()
        self._seen.setdefault(hour, set()).add(trajectory_id)
        self._payloads[trajectory_id] = payload
        if routed_experts:
            self._routed_experts[trajectory_id] = routed_experts
        self._unconsumed.add(trajectory_id)
        self.dispatch.finish(slot)
        await self._add(StreamName.TRAJECTORIES, trajectory_id, fields)
        return AppendStatus.ACCEPTED

    async def recognised(self, trajectory_ids: Sequence[str]) -> set[str]:
        return set(filter(self._seen_before, trajectory_ids))

    def _seen_before(self, trajectory_id: str) -> bool:
        return trajectory_id in self._seen.get(uuid7_unix_ms(trajectory_id) // HOUR_MS, ())

    async def restore(self, done: Slots) -> None:
        for start, end in done.ranges:
            for slot in range(start, end):
                if not self.dispatch.done(slot):
                    self.dispatch.finish(slot)

    def require_claimed(self) -> None:
        """StreamUnavailableError until a trainer has claimed an epoch."""
        if not self._board.claimed:
            msg = "no trainer has claimed this store; one that starts claims and restores it"
            raise StreamUnavailableError(msg)

    async def _refuse_when_full(self, trajectory_id: str) -> None:
        if await self.memory_fraction() >= 1.0:
            msg = f"trajectory {trajectory_id}: {self._capacity} bytes are in use; retry after something was settled"
            raise StreamFullError(msg)

    def _forget_old_ids(self) -> None:
        oldest = self._clock_ms() // HOUR_MS - self._horizon_h - 1
        for hour in [hour for hour in self._seen if hour < oldest]:
            del self._seen[hour]

    async def _add(self, stream: StreamName, trajectory_id: str, fields: Mapping[str, str]) -> None:
        now = self._clock_ms()
        self._streams[stream].items[f"{now}-{next(self._numbers)}"] = _Item(trajectory_id, dict(fields), now)
        async with self._arrived:
            self._arrived.notify_all()

    async def open_consumer(self, stream: StreamName, consumer: str) -> None:
        state = self._streams[stream]
        state.rewind[consumer] = [key for key, item in state.items.items() if item.consumer == consumer]

    async def read(self, stream: StreamName, consumer: str, *, count: int, block_ms: int) -> list[Delivery]:
        if mine := self._deliver_own(stream, consumer, count):
            return mine
        state = self._streams[stream]

        def fresh() -> list[str]:
            return [key for key, item in state.items.items() if item.consumer is None][:count]

        if not fresh() and block_ms > 0:
            try:
                async with asyncio.timeout(block_ms / 1000), self._arrived:
                    await self._arrived.wait_for(lambda: bool(fresh()))
            except TimeoutError:
                return []
        return [self._deliver(stream, key, consumer) for key in fresh()]

    def _deliver_own(self, stream: StreamName, consumer: str, count: int) -> list[Delivery]:
        state = self._streams[stream]
        waiting = state.rewind.get(consumer, [])
        own = [key for key in waiting if key in state.items and state.items[key].consumer == consumer]
        state.rewind[consumer] = own[count:]
        return [self._deliver(stream, key, consumer) for key in own[:count]]

    def _deliver(self, stream: StreamName, key: str, consumer: str) -> Delivery:
        item = self._streams[stream].items[key]
        item.consumer, item.attempt, item.delivered_ms = consumer, item.attempt + 1, self._clock_ms()
        return Delivery(stream, key, item.trajectory_id, dict(item.fields), item.attempt)

    async def claim(self, stream: StreamName, consumer: str, *, idle_ms: int, count: int) -> list[Delivery]:
        state, now = self._streams[stream], self._clock_ms()
        idle = [k for k, item in state.items.items() if item.consumer and now - item.delivered_ms >= idle_ms]
        for waiting in state.rewind.values():
            waiting[:] = [key for key in waiting if key not in idle[:count]]
        return [self._deliver(stream, key, consumer) for key in idle[:count]]

    async def newest(self, stream: StreamName, *, count: int) -> list[Entry]:
        items = itertools.islice(reversed(self._streams[stream].items.values()), count)
        return [Entry(item.trajectory_id, dict(item.fields)) for item in items]

    async def payload(self, trajectory_id: str) -> bytes | None:
        return self._payloads.get(trajectory_id)

    async def routed_experts(self, trajectory_id: str) -> bytes | None:
        return self._routed_experts.get(trajectory_id)

    def _take(self, delivery: Delivery, consumer: str) -> bool:
        """Remove the entry if this very delivery is still the newest one."""
        items = self._streams[delivery.stream].items
        item = items.get(delivery.entry_id)
        if item is None or (item.consumer, item.attempt) != (consumer, delivery.attempt):
            return False
        del items[delivery.entry_id]
        return True

    async def move(self, delivery: Delivery, consumer: str, to: StreamName, fields: Mapping[str, str]) -> bool:
        owned = self._take(delivery, consumer)
        if owned:
            await self._add(to, delivery.trajectory_id, fields)
        return owned

    async def bury(self, delivery: Delivery, consumer: str, reason: str) -> bool:
        owned = self._take(delivery, consumer)
        if owned:
            await self._entomb(delivery, reason)
        return owned

    async def _bury_waiting(self, trajectory_id: str, fields: Mapping[str, str], reason: str) -> None:
        await self._entomb(Delivery(StreamName.TRAJECTORIES, "", trajectory_id, fields, attempt=1), reason)

    async def _entomb(self, delivery: Delivery, reason: str) -> None:
        now = self._clock_ms()
        letter = DeadLetter(
            entry_id=f"{now}-{next(self._numbers)}",
            trajectory_id=delivery.trajectory_id,
            stream=delivery.stream,
            fields=delivery.fields,
            reason=reason,
            attempt=delivery.attempt,
            buried_ms=now,
            size=self._size(delivery, reason),
        )
        self._dead[letter.entry_id] = letter
        self._count(DeadEvent.BURIED, letter)
        self._unconsumed.discard(delivery.trajectory_id)
        while (await self.dead_totals()).size > self._dead_bytes:
            self._drop(next(iter(self._dead.values())), DeadEvent.FORGOTTEN)

    def _size(self, delivery: Delivery, reason: str) -> int:
        stored = self._payloads.get(delivery.trajectory_id, b""), self._routed_experts.get(delivery.trajectory_id, b"")
        texts = reason, json.dumps(dict(delivery.fields))
        return LETTER_BYTES + sum(map(len, stored)) + sum(len(text.encode()) for text in texts)

    def _count(self, event: DeadEvent, letter: DeadLetter) -> None:
        self._dead_counts.setdefault(event, Counter())[letter.kind] += 1

    def _drop(self, letter: DeadLetter, event: DeadEvent) -> None:
        del self._dead[letter.entry_id]
        self._payloads.pop(letter.trajectory_id, None)
        self._routed_experts.pop(letter.trajectory_id, None)
        self._count(event, letter)

    async def mark_consumed(self, trajectory_ids: Sequence[str]) -> None:
        self._unconsumed.difference_update(trajectory_ids)

    async def settle(self, deliveries: Sequence[Delivery], consumer: str, *, epoch: int) -> int:
        self._board.require_epoch(epoch)
        owned = [delivery for delivery in deliveries if self._take(delivery, consumer)]
        for delivery in owned:
            self._payloads.pop(delivery.trajectory_id, None)
            self._routed_experts.pop(delivery.trajectory_id, None)
            self._unconsumed.discard(delivery.trajectory_id)
        return len(owned)

    async def unconsumed(self) -> int:
        return len(self._unconsumed)

    async def depth(self, stream: StreamName) -> StreamDepth:
        items = self._streams[stream].items.values()
        return StreamDepth(
            length=len(items),
            pending=sum(item.consumer is not None for item in items),
            oldest_age_s=max((self._clock_ms() - item.added_ms for item in items), default=0) / 1000,
        )

    async def dead_letters(self, *, count: int, before: str | None = None) -> list[DeadLetter]:
        newest_first = reversed(self._dead.values())
        if before is not None:
            newest_first = (letter for letter in newest_first if _order(letter.entry_id) < _order(before))
        return list(itertools.islice(newest_first, count))

    async def requeue_dead(self, letter: DeadLetter) -> RequeueStatus:
        if letter.entry_id not in self._dead:
            return RequeueStatus.GONE
        if letter.trajectory_id not in self._payloads:
            return RequeueStatus.NO_PAYLOAD
        await self._refuse_when_full(letter.trajectory_id)
        del self._dead[letter.entry_id]
        self._count(DeadEvent.REQUEUED, letter)
        self._unconsumed.add(letter.trajectory_id)
        await self._add(letter.stream, letter.trajectory_id, letter.fields)
        return RequeueStatus.REQUEUED

    async def drop_dead(self, letter: DeadLetter) -> bool:
        if letter.entry_id not in self._dead:
            return False
        self._drop(letter, DeadEvent.DROPPED)
        return True

    async def forget_dead_before(self, unix_ms: int) -> int:
        overdue = [letter for letter in self._dead.values() if letter.buried_ms < unix_ms]
        for letter in overdue:
            self._drop(letter, DeadEvent.FORGOTTEN)
        return len(overdue)

    async def dead_totals(self) -> DeadTotals:
        counts = {event: dict(kinds) for event, kinds in self._dead_counts.items()}
        return DeadTotals(sum(letter.size for letter in self._dead.values()), counts)

    async def erase(self, trajectory_id: str, mark: Mapping[str, str]) -> Erased:
        hour = uuid7_unix_ms(trajectory_id) // HOUR_MS
        letters = [letter for letter in self._dead.values() if letter.trajectory_id == trajectory_id]
        for letter in letters:
            self._drop(letter, DeadEvent.DROPPED)
        entries = 0
        for state in self._streams.values():
            for key, item in list(state.items.items()):
                if item.trajectory_id == trajectory_id and FORGOTTEN not in item.fields:
                    del state.items[key]
                    entries += 1
        waiting, answers = self._room.erase(trajectory_id)
        payload = self._payloads.pop(trajectory_id, None) is not None
        routed = self._routed_experts.pop(trajectory_id, None) is not None
        self._seen.setdefault(hour, set()).add(trajectory_id)
        self._unconsumed.discard(trajectory_id)
        if entries + waiting:
            await self._add(StreamName.SCORED, trajectory_id, {FORGOTTEN: "1", **mark})
        return Erased(int(payload), int(routed), entries, waiting, answers, len(letters))

    async def close(self) -> None:
        """Nothing to release."""
