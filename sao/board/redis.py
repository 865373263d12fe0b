"""The board in Redis: one hash of single facts, and a hash each for versions, engines and preferences.

Board writes are few and small, so they are allowed at the memory bound, where the streams already refuse.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

from redis import asyncio as aioredis

from sao.board.base import EngineFacts, PreferenceConflictError, TrainerFacts, VersionRecord
from sao.board.messages import (
    conflicting_preference_message,
    conflicting_version_message,
    fenced_message,
    fenced_weights_message,
)
from sao.config.schema import RunConfig
from sao.preference import Preference, PreferenceDocument
from sao.redis_client import Arg, RunKeys, Scripts, connect_redis, redis_errors
from sao.streams.base import FencedError, StreamUnavailableError


class RedisBoard:
    """sao.board.base.Board for one run; every call may raise StreamUnavailableError."""

    def __init__(self, client: aioredis.Redis, keys: RunKeys) -> None:
        self._client = client
        self._keys = keys
        self._scripts = Scripts(client, "sao.board.lua")

    @classmethod
    def connect(cls, config: RunConfig) -> RedisBoard:
        """The board of this run; connects at the first call."""
        return cls(connect_redis(config.redis), RunKeys(config.run.name))

    async def new_trainer_epoch(self, *, above: int = 0, found: int | None = None, version: str = "") -> int:
        args: list[Arg] = [above, "" if found is None else found, version]
        with redis_errors("claim a trainer epoch"):
            epoch: int = await self._scripts.run("new_epoch", [self._keys.board, self._keys.versions], args)
        return epoch

    async def epoch(self) -> int:
        with redis_errors("read the trainer epoch"):
            found: Any = await self._client.hget(self._keys.board, "epoch")
        return int(found or 0)

    async def write_trainer(self, facts: TrainerFacts) -> None:
        with redis_errors("write trainer facts"):
            newest = await self._scripts.run(
                "write_trainer", [self._keys.board], [facts.epoch, facts.model_dump_json()]
            )
        if newest > facts.epoch:
            raise FencedError(fenced_message(facts.epoch, newest))

    async def trainer(self) -> TrainerFacts | None:
        with redis_errors("read trainer facts"):
            text: Any = await self._client.hget(self._keys.board, "trainer")
        return None if text is None else TrainerFacts.model_validate_json(text)

    async def announce_version(self, record: VersionRecord) -> None:
        with redis_errors(f"announce version {record.name}"):
            newest, *stored = await self._scripts.run(
                "announce_version",
                [self._keys.board, self._keys.versions],
                [record.epoch, record.name, record.model_dump_json()],
            )
        if not stored:
            raise FencedError(fenced_message(record.epoch, newest))
        known = VersionRecord.model_validate_json(stored[0])
        if known != record:
            raise ValueError(conflicting_version_message(known, record))

    async def versions(self) -> dict[str, VersionRecord]:
        texts = await self._hash(self._keys.versions)
        return {name: VersionRecord.model_validate_json(text) for name, text in texts.items()}

    async def new_weights_epoch(self, owner: str, *, above: int = 0) -> int:
        with redis_errors("claim an epoch of the weights service"):
            epoch, _ = await self._scripts.run("hold_weights", [self._keys.board], [0, owner, above])
        return int(epoch)

    async def hold_weights_epoch(self, epoch: int, owner: str) -> None:
        with redis_errors("hold the epoch of the weights service"):
            reply = await self._scripts.run("hold_weights", [self._keys.board], [epoch, owner, 0])
        self._require_weights_epoch(epoch, reply)

    def _require_weights_epoch(self, epoch: int, reply: tuple[int, bytes]) -> None:
        newest, owner = reply
        if newest > epoch:
            raise FencedError(fenced_weights_message(epoch, newest, owner.decode()))

    async def write_engine(self, facts: EngineFacts) -> None:
        keys = [self._keys.board, self._keys.engines]
        args: list[Arg] = [facts.epoch, facts.engine_id, facts.model_dump_json()]
        with redis_errors(f"write facts of {facts.engine_id}"):
            reply = await self._scripts.run("write_engine", keys, args)
        self._require_weights_epoch(facts.epoch, reply)

    async def remove_engine(self, engine_id: str, *, epoch: int = 0) -> None:
        keys = [self._keys.board, self._keys.engines]
        args: list[Arg] = [epoch, engine_id, ""]
        with redis_errors(f"forget {engine_id}"):
            reply = await self._scripts.run("write_engine", keys, args)
        self._require_weights_epoch(epoch, reply)

    async def engines(self) -> dict[str, EngineFacts]:
        texts = await self._hash(self._keys.engines)
        return {engine_id: EngineFacts.model_validate_json(text) for engine_id, text in sorted(texts.items())}

    async def put_preference(self, document: PreferenceDocument, *, if_version: int | None = None) -> Preference:
        expected = "" if if_version is None else str(if_version)
        with redis_errors(f"put preference {document.name!r}"):
            version, current = await self._scripts.run(
                "put_preference",
                [self._keys.board, self._keys.preferences],
                [secrets.token_hex(8), expected, document.model_dump_json()],
            )
        if version == 0:
            raise PreferenceConflictError(conflicting_preference_message(int(expected), current))
        return Preference(version=version, document=document)

    async def preference(self, version: int | None = None) -> Preference | None:
        with redis_errors("read the preference"):
            number: Any = (
                await self._client.hget(self._keys.board, "preference") if version is None else str(version).encode()
            )
            if number is None:
                return None
            # Versions are never changed once stored, so reading in two steps is still one consistent answer.
            text: Any = await self._client.hget(self._keys.preferences, number)
        if text is None:
            return None
        return Preference(version=int(number), document=PreferenceDocument.model_validate_json(text))

    async def restore_preferences(self, preferences: Sequence[Preference]) -> bool:
        args: list[Arg] = []
        for preference in preferences:
            args += [preference.version, preference.document.model_dump_json()]
        with redis_errors(f"restore {len(preferences)} preferences"):
            keys = [self._keys.board, self._keys.preferences]
            restored: int = await self._scripts.run("restore_preferences", keys, args)
        return restored == 1

    async def _hash(self, key: str) -> dict[str, bytes]:
        with redis_errors(f"read {key}"):
            texts: Any = await self._client.hgetall(key)
        return {name.decode(): text for name, text in texts.items()}

    async def close(self) -> None:
        with contextlib.suppress(StreamUnavailableError), redis_errors("close"):
            await self._client.aclose()
