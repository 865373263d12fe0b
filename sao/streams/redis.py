"""The streams in Redis >= 7 or Valkey; every change is one Lua script.

- An entry leaves a stream in the same step that acknowledges it, so a stream holds exactly what is not settled:
  a lost consumer group is re-created at 0 and delivers all of it again, nothing that was settled.
- The fence is (entry, consumer, attempt): only the newest delivery of an entry may move it, also when a
  stopped process wakes next to its successor of the same name.
- Commands that would answer differently when sent twice go over a client without retries.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

from redis import asyncio as aioredis
from redis import exceptions

from sao.board.messages import fenced_message
from sao.config.schema import RunConfig
from sao.ids import uuid7_unix_ms
from sao.redis_client import Arg, RunKeys, Scripts, connect_redis, redis_errors
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
    FencedError,
    RequeueStatus,
    StreamDepth,
    StreamName,
    StreamUnavailableError,
)
from sao.streams.dispatch import slot_of
from sao.streams.redis_keys import counter_of, flat
from sao.streams.redis_reader import GROUP, RedisReader, text_fields
from sao.streams.redis_room import RedisRoom
from sao.telemetry.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")

HOUR_MS: Final = 3_600_000
_ASKED_AT_ONCE: Final = 1000


class RedisStreams:
    """sao.streams.base.TrajectoryStreams for one run.

    `client` may repeat commands, `once` must not; blocking reads end within `block_limit_ms`; `samples` is how
    many rollouts the run wants of one ordinal; `dead_bytes` bounds the dead letters.
    """

    def __init__(
        self,
        client: aioredis.Redis,
        once: aioredis.Redis,
        keys: RunKeys,
        *,
        horizon_h: int = 24,
        block_limit_ms: int = 2500,
        samples: int = 1,
        dead_bytes: int = 2**26,
    ) -> None:
        self._client = client
        self._once = once
        self._keys = keys
        # An id's bucket must outlive the hour that it collects, and the horizon after it.
        self._seen_ttl_ms = (horizon_h + 2) * HOUR_MS
        self._samples = samples
        self._dead_bytes = dead_bytes
        self._scripts = Scripts(client, "sao.streams.lua")
        self._fenced = Scripts(once, "sao.streams.lua")
        self._reader = RedisReader(once, keys, block_limit_ms=block_limit_ms)
        self._room = RedisRoom(client, once, keys, let_go=self._reader.let_go, forget_dead=self._forget_dead)

    @classmethod
    def connect(cls, config: RunConfig) -> RedisStreams:
        """The streams of this run; connects at the first call."""
        return cls(
            connect_redis(config.redis),
            connect_redis(config.redis, retries=0),
            RunKeys(config.run.name),
            horizon_h=config.ingest.seen_horizon_h,
            block_limit_ms=int(config.redis.timeout_s * 500),
            samples=config.samples,
            dead_bytes=config.redis.dead_letters_mb * 2**20,
        )

    @property
    def room(self) -> RedisRoom:
        return self._room

    async def ping(self) -> None:
        with redis_errors("ping"):
            await self._client.ping()

    async def memory_fraction(self) -> float:
        with redis_errors("read memory use"):
            info = await self._client.info("memory")
        bound = int(info["maxmemory"])
        return int(info["used_memory"]) / bound if bound else 0.0

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
        slot = slot_of(ordinal, sample, self._samples)
        names = self._keys
        keys = [
            names.stream(StreamName.TRAJECTORIES),
            names.payload(trajectory_id),
            names.seen(uuid7_unix_ms(trajectory_id) // HOUR_MS),
            names.unconsumed,
            names.frontier,
            names.winners,
            names.lease_expiry,
            names.leases,
            names.routed_experts(trajectory_id),
            names.board,
        ]
        with redis_errors(f"append trajectory {trajectory_id}"):
            args: list[Arg] = [trajectory_id, payload, slot, self._seen_ttl_ms, routed_experts, *flat(fields)]
            reply: bytes = await self._scripts.run("append", keys, args)
        return AppendStatus(reply.decode())

    async def recognised(self, trajectory_ids: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for asked in _chunks(trajectory_ids):
            with redis_errors(f"look for {len(asked)} ids"):
                async with self._client.pipeline(transaction=False) as pipeline:
                    for trajectory_id in asked:
                        pipeline.sismember(self._keys.seen(uuid7_unix_ms(trajectory_id) // HOUR_MS), trajectory_id)
                    replies: list[int] = await pipeline.execute()
            found |= {trajectory_id for trajectory_id, known in zip(asked, replies, strict=True) if known}
        return found

    async def restore(self, done: Slots) -> None:
        names = self._keys
        keys = [names.frontier, names.winners, names.lease_expiry, names.leases]
        with redis_errors("restore the slots that are done"):
            await self._scripts.run("restore", keys, [done.frontier])
            for slots in _chunks(done.beyond()):
                await self._scripts.run("restore", keys, [done.frontier, *slots])

    async def open_consumer(self, stream: StreamName, consumer: str) -> None:
        await self._reader.open_consumer(stream, consumer)

    async def read(self, stream: StreamName, consumer: str, *, count: int, block_ms: int) -> list[Delivery]:
        return await self._reader.read(stream, consumer, count=count, block_ms=block_ms)

    async def claim(self, stream: StreamName, consumer: str, *, idle_ms: int, count: int) -> list[Delivery]:
        return await self._reader.claim(stream, consumer, idle_ms=idle_ms, count=count)

    async def newest(self, stream: StreamName, *, count: int) -> list[Entry]:
        with redis_errors(f"look at {stream.value}"):
            rows: Any = await self._client.xrevrange(self._keys.stream(stream), count=count)
        return [Entry(fields.pop("_id"), fields) for fields in (text_fields(raw) for _, raw in rows)]

    async def payload(self, trajectory_id: str) -> bytes | None:
        with redis_errors(f"read payload {trajectory_id}"):
            reply: Any = await self._client.get(self._keys.payload(trajectory_id))
        return None if reply is None else bytes(reply)

    async def routed_experts(self, trajectory_id: str) -> bytes | None:
        with redis_errors(f"read routed experts {trajectory_id}"):
            reply: Any = await self._client.get(self._keys.routed_experts(trajectory_id))
        return None if reply is None else bytes(reply)

    async def move(self, delivery: Delivery, consumer: str, to: StreamName, fields: Mapping[str, str]) -> bool:
        keys = [self._keys.stream(delivery.stream), self._keys.stream(to)]
        moved = await self._hand_over("move", delivery, consumer, keys, flat(fields))
        return moved == 1

    async def bury(self, delivery: Delivery, consumer: str, reason: str) -> bool:
        names, trajectory_id = self._keys, delivery.trajectory_id
        keys = [names.stream(delivery.stream), names.dead, names.unconsumed, names.dead_totals]
        keys += [names.payload(trajectory_id), names.routed_experts(trajectory_id)]
        fields = json.dumps(dict(delivery.fields))
        counter = counter_of(DeadEvent.BURIED, reason)
        texts: list[Arg] = [delivery.stream.value, reason, fields, counter, LETTER_BYTES]
        total = await self._hand_over("bury", delivery, consumer, keys, texts)
        if total == 0:
            return False
        await self._forget_dead(total)
        return True

    async def _hand_over(
        self, script: str, delivery: Delivery, consumer: str, keys: Sequence[str], rest: Sequence[Arg]
    ) -> int:
        entry: list[Arg] = [delivery.entry_id, delivery.attempt, delivery.trajectory_id]
        with redis_errors(f"{script} trajectory {delivery.trajectory_id} from {delivery.stream.value}"):
            reply: int = await self._fenced.run(script, keys, [GROUP, consumer, *entry, *rest])
        self._reader.let_go([delivery], consumer)
        return reply

    async def _forget_dead(self, total: int) -> None:
        """Delete the oldest letters while all of them take more than their bound."""
        try:
            while total > self._dead_bytes:
                with redis_errors("find the oldest dead letter"):
                    rows: Any = await self._once.xrange(self._keys.dead, count=1)
                if not rows:
                    return
                letter = _letter(*rows[0])
                _, total = await self._drop_dead(letter, DeadEvent.FORGOTTEN)
                log.warning("oldest dead letter forgotten", trajectory=letter.trajectory_id, reason=letter.reason)
        except StreamUnavailableError as error:
            # The burial itself is done and must not look undone; the next one goes on from here.
            log.warning("dead letters exceed their bound", bytes=total, error=str(error))

    async def mark_consumed(self, trajectory_ids: Sequence[str]) -> None:
        if trajectory_ids:
            with redis_errors("mark consumed"):
                await self._client.srem(self._keys.unconsumed, *trajectory_ids)

    async def settle(self, deliveries: Sequence[Delivery], consumer: str, *, epoch: int) -> int:
        owned = 0
        for stream in StreamName:
            mine = [delivery for delivery in deliveries if delivery.stream is stream]
            owned += await self._settle(stream, mine, consumer, epoch)
        return owned

    async def _settle(self, stream: StreamName, deliveries: Sequence[Delivery], consumer: str, epoch: int) -> int:
        keys = [self._keys.stream(stream), self._keys.unconsumed, self._keys.board]
        for delivery in deliveries:
            keys += [self._keys.payload(delivery.trajectory_id), self._keys.routed_experts(delivery.trajectory_id)]
        args: list[Arg] = [GROUP, consumer, epoch]
        for delivery in deliveries:
            args += [delivery.entry_id, delivery.attempt, delivery.trajectory_id]
        with redis_errors(f"settle {len(deliveries)} of {stream.value}"):
            reply: int | list[int] = await self._fenced.run("settle", keys, args)
        if isinstance(reply, list):
            raise FencedError(fenced_message(epoch, reply[0]))
        self._reader.let_go(deliveries, consumer)
        return reply

    async def unconsumed(self) -> int:
        with redis_errors("count unconsumed"):
            reply: int = await self._client.scard(self._keys.unconsumed)
        return reply

    async def depth(self, stream: StreamName) -> StreamDepth:
        key = self._keys.stream(stream)
        with redis_errors(f"measure {stream.value}"):
            length = await self._client.xlen(key)
            pending = 0
            with contextlib.suppress(exceptions.ResponseError):  # no group yet: nothing was ever delivered
                pending = (await self._client.xpending(key, GROUP))["pending"]
            oldest: Any = await self._client.xrange(key, count=1)
            seconds, micros = await self._client.time()
        age = seconds + micros / 1e6 - _unix_ms(oldest[0][0]) / 1000 if oldest else 0.0
        return StreamDepth(length=length, pending=pending, oldest_age_s=max(age, 0.0))

    async def dead_letters(self, *, count: int, before: str | None = None) -> list[DeadLetter]:
        newest = "+" if before is None else f"({before}"
        with redis_errors("list dead letters"):
            rows: Any = await self._client.xrevrange(self._keys.dead, max=newest, count=count)
        return [_letter(entry_id, flat) for entry_id, flat in rows]

    async def requeue_dead(self, letter: DeadLetter) -> RequeueStatus:
        names = self._keys
        keys = [names.dead, names.stream(letter.stream), names.unconsumed, names.dead_totals]
        keys.append(names.payload(letter.trajectory_id))
        counter = counter_of(DeadEvent.REQUEUED, letter.reason)
        args: list[Arg] = [letter.entry_id, letter.trajectory_id, counter, letter.size, *flat(letter.fields)]
        with redis_errors(f"requeue trajectory {letter.trajectory_id}"):
            reply: bytes = await self._fenced.run("requeue", keys, args)
        return RequeueStatus(reply.decode())

    async def drop_dead(self, letter: DeadLetter) -> bool:
        dropped, _ = await self._drop_dead(letter, DeadEvent.DROPPED)
        return dropped

    async def _drop_dead(self, letter: DeadLetter, event: DeadEvent) -> tuple[bool, int]:
        """Whether it was there, and the bytes of those that are left."""
        names = self._keys
        keys = [names.dead, names.dead_totals]
        keys += [names.payload(letter.trajectory_id), names.routed_experts(letter.trajectory_id)]
        with redis_errors(f"drop dead trajectory {letter.trajectory_id}"):
            args: list[Arg] = [letter.entry_id, counter_of(event, letter.reason), letter.size]
            dropped, total = await self._fenced.run("drop", keys, args)
        return dropped == 1, total

    async def forget_dead_before(self, unix_ms: int) -> int:
        names, forgotten = self._keys, 0
        while True:
            with redis_errors("find dead letters that are over their time"):
                rows: Any = await self._client.xrange(names.dead, max=f"({unix_ms}-0", count=_ASKED_AT_ONCE)
            if not rows:
                return forgotten
            keys, args = [names.dead, names.dead_totals], list[Arg]()
            for letter in (_letter(*row) for row in rows):
                keys += [names.payload(letter.trajectory_id), names.routed_experts(letter.trajectory_id)]
                args += [letter.entry_id, counter_of(DeadEvent.FORGOTTEN, letter.reason), letter.size]
            with redis_errors(f"forget {len(rows)} dead letters"):
                forgotten += await self._fenced.run("overdue", keys, args)

    async def dead_totals(self) -> DeadTotals:
        with redis_errors("count dead letters"):
            reply: Any = await self._client.hgetall(self._keys.dead_totals)
        found = text_fields(reply)
        size = int(found.pop("bytes", 0))
        counts: dict[DeadEvent, dict[str, int]] = {}
        for name, count in found.items():
            event, _, kind = name.partition(":")
            counts.setdefault(DeadEvent(event), {})[kind] = int(count)
        return DeadTotals(size, counts)

    async def erase(self, trajectory_id: str, mark: Mapping[str, str]) -> Erased:
        names = self._keys
        keys = [names.stream(StreamName.TRAJECTORIES), names.stream(StreamName.SCORED)]
        keys += [names.payload(trajectory_id), names.routed_experts(trajectory_id)]
        keys += [names.seen(uuid7_unix_ms(trajectory_id) // HOUR_MS), names.unconsumed]
        keys += [names.waiting, names.waiting_since, names.answers, names.answers_kept]
        keys += [names.answers_ready, names.answers_joined]
        # First the dead letters: while their payload is there, nobody can be told that one is gone half.
        letters = await self._drop_letters_of(trajectory_id)
        with redis_errors(f"erase trajectory {trajectory_id}"):
            args: list[Arg] = [GROUP, trajectory_id, self._seen_ttl_ms, *flat({FORGOTTEN: "1", **mark})]
            payload, routed, entries, waiting, answers = await self._fenced.run("erase", keys, args)
        # One that was buried in between; once the payload is gone, none can be requeued.
        letters += await self._drop_letters_of(trajectory_id)
        with redis_errors("write the dead letters anew"):
            await self._fenced.run("rebuild", [names.dead], [])
        return Erased(payload, routed, entries, waiting, answers, letters)

    async def _drop_letters_of(self, trajectory_id: str) -> int:
        dropped, before = 0, None
        while letters := await self.dead_letters(count=_ASKED_AT_ONCE, before=before):
            for letter in letters:
                dropped += letter.trajectory_id == trajectory_id and await self.drop_dead(letter)
            before = letters[-1].entry_id
        return dropped

    async def close(self) -> None:
        for client in (self._client, self._once):
            with contextlib.suppress(StreamUnavailableError), redis_errors("close"):
                await client.aclose()


def _letter(entry_id: bytes, raw: Mapping[bytes, bytes]) -> DeadLetter:
    found = text_fields(raw)
    return DeadLetter(
        entry_id=entry_id.decode(),
        trajectory_id=found["_id"],
        stream=StreamName(found["stream"]),
        fields=json.loads(found["fields"]),
        reason=found["reason"],
        attempt=int(found["attempt"]),
        buried_ms=_unix_ms(entry_id),
        size=int(found["size"]),
    )


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while chunk := list(islice(rest, _ASKED_AT_ONCE)):
        yield chunk


def _unix_ms(entry_id: bytes) -> int:
    return int(entry_id.split(b"-")[0])
