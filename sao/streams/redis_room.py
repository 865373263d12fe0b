"""The waiting room in Redis >= 7 or Valkey: a hash of what waits beside a sorted set of since when, and its answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from redis import asyncio as aioredis

from sao.ids import uuid7_unix_ms
from sao.redis_client import Arg, RunKeys, Scripts, redis_errors
from sao.streams.base import LETTER_BYTES, DeadEvent, Delivery, StreamName
from sao.streams.redis_keys import counter_of, flat
from sao.streams.redis_reader import GROUP
from sao.streams.room import Feedback, Heard, RoomUse, Waiting

HOUR_MS: Final = 3_600_000
_AT_ONCE: Final = 1000


class RedisRoom:
    """sao.streams.room.WaitingRoom for one run.

    `once` must not repeat commands; `let_go` and `forget_dead` are what its streams do after a delivery left the hands
    of a consumer, and after the dead letters have grown to so many bytes.
    """

    def __init__(
        self,
        client: aioredis.Redis,
        once: aioredis.Redis,
        keys: RunKeys,
        *,
        let_go: Callable[[Iterable[Delivery], str], None],
        forget_dead: Callable[[int], Awaitable[None]],
    ) -> None:
        self._client = client
        self._keys = keys
        self._scripts = Scripts(client, "sao.streams.lua")
        self._fenced = Scripts(once, "sao.streams.lua")
        self._let_go = let_go
        self._forget_dead = forget_dead

    async def park(self, delivery: Delivery, consumer: str, fields: Mapping[str, str], *, now_ms: int) -> bool:
        names, trajectory_id = self._keys, delivery.trajectory_id
        keys = [names.stream(delivery.stream), names.waiting, names.waiting_since, names.unconsumed]
        keys += [names.answers, names.answers_ready, names.answers_expired, names.answers_kept, names.answers_joined]
        args: list[Arg] = [GROUP, consumer, delivery.entry_id, delivery.attempt, trajectory_id]
        with redis_errors(f"park trajectory {trajectory_id}"):
            reply: int = await self._fenced.run("park", keys, [*args, now_ms, json.dumps(dict(fields))])
        self._let_go([delivery], consumer)
        return reply == 1

    async def answer(self, trajectory_id: str, feedback: Feedback, *, kept_max: int) -> Heard:
        names, value = self._keys, repr(feedback.value)
        keys = [names.seen(uuid7_unix_ms(trajectory_id) // HOUR_MS), names.waiting_since, names.unconsumed]
        keys += [names.answers, names.answers_ready, names.answers_kept, names.answers_joined, names.answers_expired]
        text = f"{value}\n{feedback.model_dump_json()}"
        with redis_errors(f"keep the feedback on trajectory {trajectory_id}"):
            reply: bytes = await self._scripts.run(
                "answer", keys, [trajectory_id, value, text, feedback.at_ms, kept_max]
            )
        return Heard(reply.decode())

    async def answered(self, *, count: int) -> list[tuple[Waiting, Feedback]]:
        with redis_errors("look for answers"):
            ids: Any = await self._client.srandmember(self._keys.answers_ready, count)
        return await self._answered([trajectory_id.decode() for trajectory_id in ids])

    async def find(self, trajectory_id: str) -> tuple[Waiting, Feedback] | None:
        return next(iter(await self._answered([trajectory_id])), None)

    async def _answered(self, ids: Sequence[str]) -> list[tuple[Waiting, Feedback]]:
        if not ids:
            return []
        waiting = await self._waiting(ids)
        with redis_errors("read answers"):
            answers: Any = await self._client.hmget(self._keys.answers, list(ids))
        pairs = zip(waiting, answers, strict=True)
        return [(one, _feedback(answer)) for one, answer in pairs if one is not None and answer is not None]

    async def waiting(self, *, count: int) -> list[Waiting]:
        with redis_errors("list what waits for feedback"):
            ids: Any = await self._client.zrange(self._keys.waiting_since, 0, min(count, _AT_ONCE) - 1)
        found = await self._waiting([trajectory_id.decode() for trajectory_id in ids])
        return [one for one in found if one is not None]

    async def _waiting(self, ids: Sequence[str]) -> list[Waiting | None]:
        """One for each id, read in one step; None: it is not there."""
        if not ids:
            return []
        with redis_errors("read what waits for feedback"):
            async with self._client.pipeline(transaction=True) as pipeline:
                pipeline.hmget(self._keys.waiting, list(ids))
                pipeline.zmscore(self._keys.waiting_since, list(ids))
                fields, since = await pipeline.execute()
        return [
            None if text is None or at is None else Waiting(trajectory_id, json.loads(text), int(at))
            for trajectory_id, text, at in zip(ids, fields, since, strict=True)
        ]

    async def join(
        self,
        waiting: Waiting,
        fields: Mapping[str, str],
        *,
        now_ms: int,
        answered: bool = True,
        to: StreamName = StreamName.SCORED,
    ) -> bool:
        names = self._keys
        keys = [names.waiting, names.waiting_since, names.stream(to)]
        keys += [names.answers_ready, names.answers_kept, names.answers_joined]
        args: list[Arg] = [waiting.trajectory_id, waiting.since_ms, now_ms, int(answered), *flat(fields)]
        with redis_errors(f"join the feedback on trajectory {waiting.trajectory_id}"):
            reply: int = await self._fenced.run("join", keys, args)
        return reply == 1

    async def bury(self, waiting: Waiting, reason: str, *, now_ms: int, answered: bool = False) -> bool:
        names, trajectory_id = self._keys, waiting.trajectory_id
        keys = [names.waiting, names.waiting_since, names.answers_ready, names.dead, names.dead_totals]
        keys += [names.payload(trajectory_id), names.routed_experts(trajectory_id)]
        keys += [names.answers_expired, names.answers_kept, names.answers_joined]
        args: list[Arg] = [
            trajectory_id,
            waiting.since_ms,
            now_ms,
            int(answered),
            StreamName.TRAJECTORIES.value,
            reason,
        ]
        args += [json.dumps(dict(waiting.fields)), counter_of(DeadEvent.BURIED, reason), LETTER_BYTES]
        with redis_errors(f"bury trajectory {trajectory_id} from the waiting room"):
            total: int = await self._fenced.run("expire", keys, args)
        if total:
            await self._forget_dead(total)
        return total > 0

    async def forget(self, *, kept_before_ms: int, joined_before_ms: int, remembered: int) -> int:
        names = self._keys
        keys = [names.answers, names.answers_kept, names.answers_joined, names.answers_expired, names.waiting_since]
        with redis_errors("forget old answers"):
            args: list[Arg] = [kept_before_ms, joined_before_ms, remembered, _AT_ONCE]
            reply: int = await self._fenced.run("forget", keys, args)
        return reply

    async def use(self) -> RoomUse:
        names = self._keys
        with redis_errors("measure the waiting room"):
            async with self._client.pipeline(transaction=True) as pipeline:
                pipeline.zcard(names.waiting_since)
                pipeline.zrange(names.waiting_since, 0, 0, withscores=True)
                pipeline.zcard(names.answers_kept)
                pipeline.scard(names.answers_ready)
                waiting, oldest, kept, ready = await pipeline.execute()
        return RoomUse(waiting, int(oldest[0][1]) if oldest else None, max(kept - ready, 0))


def _feedback(text: bytes) -> Feedback:
    return Feedback.model_validate_json(text.partition(b"\n")[2])
