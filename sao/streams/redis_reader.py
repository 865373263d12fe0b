"""How deliveries come into the hands of one process: read, read again after a restart, claim.

- A lost consumer group is re-created at 0: a stream holds exactly what is not settled, so that is what comes again.
- An answer that is lost on the way leaves deliveries in our name; the next read looks for them.
- What is in our hands already is not handed out a second time by either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from redis import asyncio as aioredis
from redis import exceptions

from sao.redis_client import RunKeys, Scripts, redis_errors
from sao.streams.base import Delivery, StreamName

GROUP: Final = "sao"


class _Consumer:
    """What one consumer of this process has in its hands, and whether older deliveries wait to be read again."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        """Attempt by entry id."""
        self.rewind_after: str | None = None


class RedisReader:
    """The reading half of RedisStreams. `client` must not retry: an answer that is lost is looked for instead."""

    def __init__(self, client: aioredis.Redis, keys: RunKeys, *, block_limit_ms: int) -> None:
        self._client = client
        self._keys = keys
        self._block_limit_ms = block_limit_ms
        self._scripts = Scripts(client, "sao.streams.lua")
        self._consumers: dict[tuple[StreamName, str], _Consumer] = {}

    async def open_consumer(self, stream: StreamName, consumer: str) -> None:
        with redis_errors(f"open consumer {consumer} of {stream.value}"):
            await self._create_group(stream)
        state = self._consumers[stream, consumer] = _Consumer()
        state.rewind_after = "0-0"

    async def _create_group(self, stream: StreamName) -> None:
        await self._scripts.run("create_group", [self._keys.stream(stream)], [GROUP])

    async def read(self, stream: StreamName, consumer: str, *, count: int, block_ms: int) -> list[Delivery]:
        state = self._consumers.setdefault((stream, consumer), _Consumer())
        with redis_errors(f"read {stream.value} as {consumer}"):
            try:
                return await self._read(state, stream, consumer, count, block_ms)
            except exceptions.ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                await self._create_group(stream)
                return await self._read(state, stream, consumer, count, block_ms)

    async def _read(
        self, state: _Consumer, stream: StreamName, consumer: str, count: int, block_ms: int
    ) -> list[Delivery]:
        key = self._keys.stream(stream)
        after = state.rewind_after
        # An answer that is lost on the way leaves deliveries in our name: look for them the next time.
        state.rewind_after = after or "0-0"
        if after is not None:
            rows = await self._scripts.run("rewind", [key], [GROUP, consumer, after, count, *state.held])
            if rows:
                state.rewind_after = rows[-1][0].decode()
                return self._deliveries(state, stream, rows)
        block = min(block_ms, self._block_limit_ms) if block_ms > 0 else None
        reply: Any = await self._client.xreadgroup(GROUP, consumer, {key: ">"}, count=count, block=block)
        state.rewind_after = None
        rows = [(entry_id, fields, 1) for entry_id, fields in reply[0][1]] if reply else []
        # A re-created group delivers again what is still in our hands: those stay as they are.
        again = {row[0]: state.held[row[0].decode()] for row in rows if row[0].decode() in state.held}
        for entry_id, attempt in again.items():
            await self._client.xclaim(key, GROUP, consumer, 0, [entry_id], retrycount=attempt, justid=True)
        return self._deliveries(state, stream, [row for row in rows if row[0] not in again])

    async def claim(self, stream: StreamName, consumer: str, *, idle_ms: int, count: int) -> list[Delivery]:
        state = self._consumers.setdefault((stream, consumer), _Consumer())
        with redis_errors(f"claim from {stream.value} as {consumer}"):
            try:
                rows = await self._scripts.run("claim", [self._keys.stream(stream)], [GROUP, consumer, idle_ms, count])
            except exceptions.ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                return []
        return self._deliveries(state, stream, rows)

    def _deliveries(self, state: _Consumer, stream: StreamName, rows: Iterable[Any]) -> list[Delivery]:
        found = []
        for entry_id, flat, attempt in rows:
            fields = text_fields(flat)
            delivery = Delivery(stream, entry_id.decode(), fields.pop("_id"), fields, attempt)
            state.held[delivery.entry_id] = attempt
            found.append(delivery)
        return found

    def let_go(self, deliveries: Iterable[Delivery], consumer: str) -> None:
        """These are no longer in the hands of `consumer`: handed on, settled or lost."""
        for delivery in deliveries:
            held = self._consumers.setdefault((delivery.stream, consumer), _Consumer()).held
            if held.get(delivery.entry_id) == delivery.attempt:
                del held[delivery.entry_id]


def text_fields(raw: Mapping[bytes, bytes] | Sequence[bytes]) -> dict[str, str]:
    """An entry's fields, from a command's mapping or a script's flat list."""
    pairs = raw.items() if isinstance(raw, Mapping) else zip(raw[::2], raw[1::2], strict=True)
    return {name.decode(): value.decode() for name, value in pairs}
