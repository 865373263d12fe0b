"""The board in Redis: one hash of single facts, and a hash each for versions, engines and preferences.

Board writes are few and small, so they are allowed at the memory bound, where the streams already refuse.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from typing import Any

from redis import asyncio as aioredis

from sao.board.base import (
    BoardBehindError,
    EngineFacts,
    PreferenceConflictError,
    PreferenceLimitError,
    PreferencesHeldError,
    ScheduleFullError,
    TrainerFacts,
    UnknownSwitchError,
    VersionRecord,
)
from sao.board.messages import (
    behind_message,
    conflicting_preference_message,
    conflicting_version_message,
    fenced_message,
    fenced_weights_message,
    full_schedule_message,
    unknown_switch_message,
)
from sao.config.schema import RunConfig
from sao.preference import Preference, PreferenceDocument
from sao.preference_changes import (
    MAX_FOLLOWED,
    MAX_SCHEDULED,
    ChangeRequest,
    Hold,
    Kept,
    PreferenceChange,
    ScheduledPreference,
    stored_by,
)
from sao.redis_client import Arg, RunKeys, Scripts, connect_redis, redis_errors
from sao.streams.base import FencedError, StreamUnavailableError

_CHANGES_AT_ONCE = 64


class RedisBoard:
    """sao.board.base.Board for one run; every call may raise StreamUnavailableError."""

    def __init__(self, client: aioredis.Redis, keys: RunKeys) -> None:
        self._client = client
        self._keys = keys
        self._scripts = Scripts(client, "sao.board.lua")
        self._read: tuple[int, bytes, Preference] | None = None

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

    async def change_preferences(
        self, asked: ChangeRequest, *, above: int = 0, min_seconds: float = 0.0
    ) -> PreferenceChange | None:
        made = await self._change(asked, above, min_seconds, follow=False)
        return made[-1] if made else None

    async def change_and_follow(
        self, asked: ChangeRequest, *, above: int, min_seconds: float = 0.0
    ) -> list[PreferenceChange]:
        return await self._change(asked, above, min_seconds, follow=True)

    async def _change(
        self, asked: ChangeRequest, above: int, min_seconds: float, *, follow: bool
    ) -> list[PreferenceChange]:
        what: dict[str, object] = {
            "what": asked.what,
            "above": above,
            "min_seconds": min_seconds,
            "most": MAX_SCHEDULED,
            "followed": MAX_FOLLOWED if follow else 0,
            "if_version": asked.if_version,
            "switch": asked.switch,
            "body": asked.body(),
        }
        given = json.dumps({key: value for key, value in what.items() if value is not None})
        with redis_errors(f"{asked.what} a preference"):
            verdict, *texts = await self._scripts.run(
                "change_preferences", self._preference_keys, [secrets.token_hex(8), given]
            )
        return _judged(asked, above, verdict.decode(), texts)

    @property
    def _preference_keys(self) -> list[str]:
        keys = self._keys
        return [
            keys.board,
            keys.preferences,
            keys.preference_changes,
            keys.preference_schedule,
            keys.preference_requests,
        ]

    async def put_preference(self, document: PreferenceDocument, *, if_version: int | None = None) -> Preference:
        asked = ChangeRequest(what="put", document=document, if_version=if_version)
        return stored_by(await self.change_preferences(asked))

    async def preference(self, version: int | None = None) -> Preference | None:
        if version is None:
            return await self._current_preference()
        with redis_errors("read the preference"):
            text: Any = await self._client.hget(self._keys.preferences, str(version))
        return None if text is None else _stored(version, text)

    async def _current_preference(self) -> Preference | None:
        keys = [self._keys.board, self._keys.preferences]
        with redis_errors("read the preference"):
            found = await self._scripts.run("read_preference", keys, [])
        if not found:
            return None
        number, text = int(found[0]), found[1]
        if self._read is None or self._read[:2] != (number, text):  # read for every scoring, and seldom another one
            self._read = (number, text, _stored(number, text))
        return self._read[2]

    async def preferences(self, *, before: int | None = None, limit: int) -> list[Preference]:
        with redis_errors("read the preferences"):
            current: Any = await self._client.hget(self._keys.board, "preference")
            newest = min(int(current or 0), before - 1 if before is not None else int(current or 0))
            found: list[Preference] = []
            while newest > 0 and len(found) < limit:  # a damaged or older log leaves gaps
                numbers = list(range(newest, max(newest - limit, 0), -1))
                texts: Any = await self._client.hmget(self._keys.preferences, list(map(str, numbers)))
                found += [_stored(one, text) for one, text in zip(numbers, texts, strict=True) if text is not None]
                newest -= limit
        return found[:limit]

    async def scheduled_preferences(self) -> list[ScheduledPreference]:
        texts = await self._hash(self._keys.preference_schedule)
        lines = [text.split(b"\n", 1)[0] for _, text in sorted(texts.items(), key=lambda item: int(item[0]))]
        return [ScheduledPreference.of(PreferenceChange.model_validate_json(line)) for line in lines]

    async def preference_hold(self) -> Hold:
        with redis_errors("read whether preferences are held"):
            line: Any = await self._client.hget(self._keys.board, "preference-hold")
        return Hold.of(None if line is None else PreferenceChange.model_validate_json(line))

    async def preference_changes(self, after: int) -> list[PreferenceChange]:
        found: list[PreferenceChange] = []
        while True:
            first = after + len(found) + 1
            numbers = map(str, range(first, first + _CHANGES_AT_ONCE))
            with redis_errors("read the records of preference changes"):
                lines: Any = await self._client.hmget(self._keys.preference_changes, list(numbers))
            for line in lines:
                if line is None:
                    return found
                found.append(PreferenceChange.model_validate_json(line))

    async def restore_preferences(self, kept: Kept) -> bool:
        hold = kept.hold.line() if kept.hold is not None else ""
        args: list[Arg] = [kept.seq, kept.version, str(kept.stored_s), hold, len(kept.versions), len(kept.changes)]
        for version, preference in kept.versions.items():
            args += [version, preference.model_dump_json(exclude_none=True)]
        lines = {change.seq: change.line() for change in kept.changes}
        for seq, line in lines.items():
            args += [seq, line]
        for seq, change in kept.scheduled.items():
            args += [seq, f"{lines[seq]}\n{change.body()}"]
        with redis_errors(f"restore {len(kept.versions)} preferences"):
            restored: int = await self._scripts.run("restore_preferences", self._preference_keys, args)
        return restored == 1

    async def _hash(self, key: str) -> dict[str, bytes]:
        with redis_errors(f"read {key}"):
            texts: Any = await self._client.hgetall(key)
        return {name.decode(): text for name, text in texts.items()}

    async def close(self) -> None:
        with contextlib.suppress(StreamUnavailableError), redis_errors("close"):
            await self._client.aclose()


def _judged(asked: ChangeRequest, above: int, verdict: str, texts: list[bytes]) -> list[PreferenceChange]:
    """What change_preferences.lua answered."""
    text = texts[-1]
    match verdict:
        case "done":
            return [PreferenceChange.model_validate_json(line) for line in texts]
        case "nothing":
            return []
        case "behind":
            raise BoardBehindError(behind_message(int(text), above))
        case "conflict":
            raise PreferenceConflictError(conflicting_preference_message(asked.if_version or 0, int(text)))
        case "held":
            raise PreferencesHeldError(Hold.of(PreferenceChange.model_validate_json(text)))
        case "limited":
            raise PreferenceLimitError(float(text))
        case "full":
            raise ScheduleFullError(full_schedule_message())
        case "unknown":
            raise UnknownSwitchError(unknown_switch_message(asked.switch))
    msg = f"change_preferences.lua answered {verdict!r}"
    raise AssertionError(msg)


def _stored(version: int, text: bytes) -> Preference:
    """A version as any release stored it: the record that made it, itself, or the document alone."""
    found = json.loads(text)
    if "seq" in found:
        return stored_by(PreferenceChange.model_validate_json(text))
    if "document" in found:
        return Preference.model_validate_json(text)
    return Preference(version=version, document=PreferenceDocument.model_validate_json(text))
