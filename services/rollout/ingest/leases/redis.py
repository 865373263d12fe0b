"""The lease ledger in Redis >= 7 or Valkey, on the keys that `append` releases leases in; one Lua script per call."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from redis import asyncio as aioredis

from sao.config.schema import RunConfig
from sao.redis_client import Arg, RunKeys, Scripts, connect_redis, redis_errors
from sao.streams.base import StreamUnavailableError
from services.rollout.ingest.leases.base import Lease, LedgerState, check_deadline, lease_id, parse_lease_id


class RedisLeaseLedger:
    """LeaseLedger for one run.

    `client` must not retry: a grant that is repeated after a lost answer would hold its first leases until they
    run out. `samples` is how many rollouts the run wants of one ordinal, as in RedisStreams.
    """

    def __init__(self, client: aioredis.Redis, keys: RunKeys, *, samples: int = 1) -> None:
        self._client = client
        self._keys = keys
        self._samples = samples
        self._scripts = Scripts(client, "services.rollout.ingest.leases.lua")

    @classmethod
    def connect(cls, config: RunConfig) -> RedisLeaseLedger:
        """The ledger of this run; connects at the first call."""
        return cls(connect_redis(config.redis, retries=0), RunKeys(config.run.name), samples=config.samples)

    async def lease(
        self, worker_id: str, max_leases: int, *, limit: int, now_ms: int, ttl_ms: int, deadline_ms: int
    ) -> list[Lease]:
        check_deadline(now_ms, deadline_ms)
        names = self._keys
        keys = [names.cursor, names.frontier, names.winners, names.lease_expiry, names.leases, names.unconsumed]
        keys.append(names.board)
        args: list[Arg] = [worker_id, max_leases, limit, now_ms, ttl_ms, deadline_ms]
        with redis_errors(f"lease prompts to {worker_id}"):
            flat: list[bytes] = await self._scripts.run("lease", keys, args)
        numbers = [int(text) for text in flat]
        return [
            self._lease(worker_id, slot, attempt, expires_ms, deadline_ms)
            for slot, attempt, expires_ms in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        ]

    async def renew(self, worker_id: str, lease_ids: Sequence[str], *, now_ms: int, ttl_ms: int) -> list[Lease]:
        args: list[Arg] = [worker_id, now_ms, ttl_ms]
        for parsed in map(parse_lease_id, lease_ids):
            args += parsed or ()
        with redis_errors(f"renew {len(lease_ids)} leases of {worker_id}"):
            flat: list[bytes] = await self._scripts.run("renew", [self._keys.lease_expiry, self._keys.leases], args)
        numbers = [int(text) for text in flat]
        return [
            self._lease(worker_id, *row)
            for row in zip(numbers[::4], numbers[1::4], numbers[2::4], numbers[3::4], strict=True)
        ]

    async def state(self, now_ms: int) -> LedgerState:
        keys = [self._keys.cursor, self._keys.frontier, self._keys.lease_expiry]
        with redis_errors("read the state of the leases"):
            live, expired, cursor, frontier = await self._scripts.run("state", keys, [now_ms])
        return LedgerState(live, expired, cursor // self._samples, frontier // self._samples)

    async def close(self) -> None:
        with contextlib.suppress(StreamUnavailableError), redis_errors("close"):
            await self._client.aclose()

    def _lease(self, worker_id: str, slot: int, attempt: int, expires_ms: int, deadline_ms: int) -> Lease:
        ordinal, sample = divmod(slot, self._samples)
        return Lease(lease_id(slot, attempt), worker_id, ordinal, sample, attempt, expires_ms, deadline_ms)
