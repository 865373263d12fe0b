"""The board inside one process: the twin that unit tests and single-process runs use."""

from __future__ import annotations

from collections.abc import Sequence

from sao.board.base import EngineFacts, PreferenceConflictError, TrainerFacts, VersionRecord
from sao.board.messages import (
    conflicting_preference_message,
    conflicting_version_message,
    fenced_message,
    fenced_weights_message,
)
from sao.preference import Preference, PreferenceDocument
from sao.streams.base import FencedError


class MemoryBoard:
    """sao.board.base.Board on plain dictionaries."""

    def __init__(self, *, claimed: bool = False) -> None:
        self.newest_epoch = 0
        self.weights_epoch = 0
        self._weights_owner = ""
        self.claimed = claimed
        """Whether a trainer has begun; without a trainer of its own, a test may say that one has."""
        self._trainer: TrainerFacts | None = None
        self._versions: dict[str, VersionRecord] = {}
        self._engines: dict[str, EngineFacts] = {}
        self._preferences: dict[int, Preference] = {}

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

    async def put_preference(self, document: PreferenceDocument, *, if_version: int | None = None) -> Preference:
        current = self._current
        if if_version is not None and if_version != current:
            raise PreferenceConflictError(conflicting_preference_message(if_version, current))
        stored = Preference(version=current + 1, document=document)
        self._preferences[stored.version] = stored
        return stored

    async def preference(self, version: int | None = None) -> Preference | None:
        return self._preferences.get(self._current if version is None else version)

    async def restore_preferences(self, preferences: Sequence[Preference]) -> bool:
        if self._current >= preferences[-1].version:
            return False
        self._preferences |= {preference.version: preference for preference in preferences}
        return True

    @property
    def _current(self) -> int:
        return max(self._preferences, default=0)

    async def close(self) -> None:
        """Nothing to release."""
