"""The board inside one process: the twin that unit tests and single-process runs use."""

from __future__ import annotations

import time
from collections.abc import Callable

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
    refused_switch_message,
    unknown_switch_message,
)
from sao.preference import Preference, PreferenceDocument
from sao.preference_changes import (
    MAX_FOLLOWED,
    MAX_SCHEDULED,
    Asked,
    ChangeRequest,
    Hold,
    Kept,
    PreferenceChange,
    ScheduledPreference,
    What,
    stored_by,
)
from sao.streams.base import FencedError


class MemoryBoard:
    """sao.board.base.Board on plain dictionaries."""

    def __init__(self, *, claimed: bool = False, clock: Callable[[], float] = time.time) -> None:
        self.newest_epoch = 0
        self.weights_epoch = 0
        self._weights_owner = ""
        self.claimed = claimed
        """Whether a trainer has begun; without a trainer of its own, a test may say that one has."""
        self._trainer: TrainerFacts | None = None
        self._versions: dict[str, VersionRecord] = {}
        self._engines: dict[str, EngineFacts] = {}
        self._kept = Kept()
        self._clock = clock

    async def new_trainer_epoch(self, *, above: int = 0, found: int | None = None, version: str = "") -> int:
        if found not in (None, self.newest_epoch) or (version and version not in self._versions):
            return 0
        self.newest_epoch = max(self.newest_epoch, above) + 1
        self.claimed = True
        return self.newest_epoch

    async def epoch(self) -> int:
        return self.newest_epoch

    def require_epoch(self, epoch: int) -> None:
        """FencedError when a newer trainer epoch than `epoch` exists."""
        if epoch < self.newest_epoch:
            raise FencedError(fenced_message(epoch, self.newest_epoch))

    async def write_trainer(self, facts: TrainerFacts) -> None:
        self.require_epoch(facts.epoch)
        self._trainer = facts

    async def trainer(self) -> TrainerFacts | None:
        return self._trainer

    async def announce_version(self, record: VersionRecord) -> None:
        self.require_epoch(record.epoch)
        known = self._versions.setdefault(record.name, record)
        if known != record:
            raise ValueError(conflicting_version_message(known, record))

    async def versions(self) -> dict[str, VersionRecord]:
        return dict(self._versions)

    async def new_weights_epoch(self, owner: str, *, above: int = 0) -> int:
        self.weights_epoch, self._weights_owner = max(self.weights_epoch, above) + 1, owner
        return self.weights_epoch

    async def hold_weights_epoch(self, epoch: int, owner: str) -> None:
        self._require_weights_epoch(epoch)
        self.weights_epoch, self._weights_owner = epoch, owner

    def _require_weights_epoch(self, epoch: int) -> None:
        if epoch < self.weights_epoch:
            raise FencedError(fenced_weights_message(epoch, self.weights_epoch, self._weights_owner))

    async def write_engine(self, facts: EngineFacts) -> None:
        self._require_weights_epoch(facts.epoch)
        self._engines[facts.engine_id] = facts

    async def remove_engine(self, engine_id: str, *, epoch: int = 0) -> None:
        self._require_weights_epoch(epoch)
        self._engines.pop(engine_id, None)

    async def engines(self) -> dict[str, EngineFacts]:
        return dict(self._engines)

    async def change_preferences(
        self, asked: ChangeRequest, *, above: int = 0, min_seconds: float = 0.0
    ) -> PreferenceChange | None:
        kept = self._kept
        if kept.seq < above:
            raise BoardBehindError(behind_message(kept.seq, above))
        match asked.what:
            case "apply":
                return self._apply(min_seconds)
            case "cancel":
                if asked.switch not in kept.scheduled:
                    raise UnknownSwitchError(unknown_switch_message(asked.switch))
                return self._record("cancel", asked, switch=asked.switch)
            case "hold" | "resume":
                return self._record(asked.what, asked) if asked.what == "hold" or kept.hold is not None else None
        if kept.hold is not None:
            raise PreferencesHeldError(Hold.of(kept.hold))
        if asked.if_version not in {None, kept.version}:
            raise PreferenceConflictError(conflicting_preference_message(asked.if_version or 0, kept.version))
        if asked.what == "schedule":
            if len(kept.scheduled) >= MAX_SCHEDULED:
                raise ScheduleFullError(full_schedule_message())
            return self._record("schedule", asked)
        if (wait_s := kept.stored_s + min_seconds - self._clock()) > 0:
            raise PreferenceLimitError(wait_s)
        return self._record(asked.what, asked, version=kept.version + 1)

    async def change_and_follow(
        self, asked: ChangeRequest, *, above: int, min_seconds: float = 0.0
    ) -> list[PreferenceChange]:
        change = await self.change_preferences(asked, above=above, min_seconds=min_seconds)
        if change is None:
            return []
        before = [one for one in self._kept.changes if above < one.seq < change.seq]
        return [*(before if len(before) <= MAX_FOLLOWED else []), change]

    def _apply(self, min_seconds: float) -> PreferenceChange | None:
        kept, now = self._kept, self._clock()
        update = self._trainer.update if self._trainer is not None else -1
        due = sorted(filter(lambda one: _is_due(one, now, update), kept.scheduled.values()), key=_rank)
        if kept.hold is not None or not due:
            return None
        one = due[0]
        if one.if_version not in {None, kept.version}:
            detail = refused_switch_message(one.if_version or 0, kept.version)
            return self._record("refuse", one, switch=one.seq, detail=detail)
        if kept.stored_s + min_seconds > now:
            return None
        return self._record("apply", one, version=kept.version + 1, switch=one.seq)

    def _record(
        self,
        what: What,
        asked: ChangeRequest | PreferenceChange,
        *,
        version: int | None = None,
        switch: int | None = None,
        detail: str | None = None,
    ) -> PreferenceChange:
        change = PreferenceChange(
            seq=self._kept.seq + 1,
            when_s=self._clock(),
            what=what,
            version=version,
            switch=switch,
            detail=detail,
            **{name: getattr(asked, name) for name in Asked.model_fields},
        )
        self._kept.add(change)
        return change

    async def put_preference(self, document: PreferenceDocument, *, if_version: int | None = None) -> Preference:
        change = await self.change_preferences(ChangeRequest(what="put", document=document, if_version=if_version))
        return stored_by(change)

    async def preference(self, version: int | None = None) -> Preference | None:
        return self._kept.versions.get(self._kept.version if version is None else version)

    async def preferences(self, *, before: int | None = None, limit: int) -> list[Preference]:
        versions = sorted((one for one in self._kept.versions if before is None or one < before), reverse=True)
        return [self._kept.versions[version] for version in versions[:limit]]

    async def scheduled_preferences(self) -> list[ScheduledPreference]:
        return [ScheduledPreference.of(one) for one in self._kept.scheduled.values()]

    async def preference_hold(self) -> Hold:
        return Hold.of(self._kept.hold)

    async def preference_changes(self, after: int) -> list[PreferenceChange]:
        return [change for change in self._kept.changes if change.seq > after]

    async def restore_preferences(self, kept: Kept) -> bool:
        if self._kept.seq >= kept.seq and self._kept.version >= kept.version:
            return False
        self._kept = Kept.of(kept.changes, older={**self._kept.versions, **kept.versions}.values())
        return True

    async def close(self) -> None:
        """Nothing to release."""


def _is_due(switch: PreferenceChange, now: float, update: int) -> bool:
    if switch.at_update is not None:
        return switch.at_update <= update
    return switch.at_s is not None and switch.at_s <= now


def _rank(switch: PreferenceChange) -> tuple[bool, float, int]:
    """Updates before times, each in their order: the one that was meant last is the one that stays."""
    at_s = switch.at_s if switch.at_s is not None else 0.0
    return switch.at_update is None, at_s if switch.at_update is None else switch.at_update, switch.seq
