"""The board inside one process: the twin that unit tests and single-process runs use."""

from __future__ import annotations

from sao.board.base import EngineFacts, PreferenceConflictError, TrainerFacts, VersionRecord
from sao.board.messages import conflicting_preference_message, conflicting_version_message, fenced_message
from sao.preference import Preference, PreferenceDocument
from sao.streams.base import FencedError


class MemoryBoard:
    """sao.board.base.Board on plain dictionaries."""

    def __init__(self) -> None:
        self.epoch = 0
        """The newest trainer epoch; MemoryStreams reads it."""
        self._trainer: TrainerFacts | None = None
        self._versions: dict[str, VersionRecord] = {}
        self._engines: dict[str, EngineFacts] = {}
        self._preferences: list[Preference] = []

    async def new_trainer_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def require_epoch(self, epoch: int) -> None:
        """FencedError when a newer trainer epoch than `epoch` exists."""
        if epoch < self.epoch:
            raise FencedError(fenced_message(epoch, self.epoch))

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

    async def write_engine(self, facts: EngineFacts) -> None:
        self._engines[facts.engine_id] = facts

    async def engines(self) -> dict[str, EngineFacts]:
        return dict(self._engines)

    async def put_preference(self, document: PreferenceDocument, *, if_version: int | None = None) -> Preference:
        current = len(self._preferences)
        if if_version is not None and if_version != current:
            raise PreferenceConflictError(conflicting_preference_message(if_version, current))
        stored = Preference(version=current + 1, document=document)
        self._preferences.append(stored)
        return stored

    async def preference(self, version: int | None = None) -> Preference | None:
        number = len(self._preferences) if version is None else version
        return self._preferences[number - 1] if 1 <= number <= len(self._preferences) else None

    async def close(self) -> None:
        """Nothing to release."""
