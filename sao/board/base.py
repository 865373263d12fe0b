"""The board boundary: one place per run for small facts, each with exactly one writer.

| fact | writer | readers |
|---|---|---|
| `TrainerFacts` (update, version, consumed, epoch, state) | trainer | ingest (admission), weights, supervisor |
| `VersionRecord` by name, announced *before* any engine loads it | trainer | ingest (known), trainer (lag), weights |
| `EngineFacts` by engine id | weights | rollout (which engines there are, and in rotation), supervisor |
| `Preference` by version, the current one, scheduled ones, the hold, records of changes | reward | reward, trainer |

Writes of the trainer and of the weights service carry their epochs and are refused (FencedError) when a newer one of
them has started. Every call may raise StreamUnavailableError (sao.streams.base): the board lives where the streams do.
tests/contract/test_board.py runs on every implementation.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field

from sao.preference import Preference, PreferenceDocument
from sao.preference_changes import ChangeRequest, Hold, Kept, PreferenceChange, ScheduledPreference


class _Fact(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainerState(Enum):
    STARTING = "starting"
    TRAINING = "training"
    FINISHED = "finished"


class TrainerFacts(_Fact):
    epoch: Annotated[int, Field(ge=1)]
    update: Annotated[int, Field(ge=0)]
    """Policy updates made."""
    version: str
    """Newest published weight version; empty before the first."""
    consumed: Annotated[int, Field(ge=0)]
    """Trajectories trained on."""
    state: TrainerState


class VersionRecord(_Fact):
    name: str
    update: Annotated[int, Field(ge=0)]
    parent: str | None
    epoch: int


class EngineState(Enum):
    STARTING = "starting"
    """Not verified yet."""
    SERVING = "serving"
    QUIESCING = "quiescing"
    QUIESCED = "quiesced"
    LOADING = "loading"
    VERIFYING = "verifying"
    QUARANTINED = "quarantined"
    """A round failed on it; it serves nobody until a later round verifies it."""


class EngineFacts(_Fact):
    engine_id: str
    url: str
    state: EngineState
    version: str
    """The version it serves, or is being brought to; empty before the first."""
    verified: list[str] = []
    """Versions whose canary this engine has passed, newest last, the last 16."""
    error: str = ""
    doubted_s: float = 0.0
    """Unix seconds at which it was last in doubt what it serves: no turn that crossed this moment is believed, even if
    the same version is proven afterwards. A mark to compare, not a time to reckon with."""
    since_s: float
    """Unix seconds of the last change of state."""
    epoch: Annotated[int, Field(ge=0)] = 0
    """Of the weights service that said so."""

    @property
    def in_rotation(self) -> bool:
        """Whether rollout workers may start turns on it."""
        return self.state is EngineState.SERVING


class PreferenceConflictError(Exception):
    """The preference changed since the version the writer had read."""


class PreferencesHeldError(Exception):
    """Changes are held."""

    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        by = f" by {hold.author}" if hold.author else ""
        why = f": {hold.reason}" if hold.reason else ""
        super().__init__(f"changes of the preference are held{by}{why}; resume them first")


class PreferenceLimitError(Exception):
    """The last change is too short a time ago."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        super().__init__(f"the preference was changed a moment ago; the next change may come in {wait_s:.3g} s")


class ScheduleFullError(Exception):
    """As many switches wait as may."""


class UnknownSwitchError(KeyError):
    """No switch of this id waits: it took effect, was refused or cancelled, or never was."""


class BoardBehindError(Exception):
    """The board has lost records of preference changes that the caller knows of: restore them, then repeat."""


class Board(Protocol):
    async def new_trainer_epoch(self, *, above: int = 0, found: int | None = None, version: str = "") -> int:
        """Claim the next epoch that is above `above`; every older trainer is fenced from now on.

        0, and nothing is claimed, when the newest epoch is not the one `found`, or `version` is not on the board: the
        store has changed since the caller looked.
        """

    async def epoch(self) -> int:
        """The newest epoch claimed; 0 when none was, or when the store has lost it."""

    async def write_trainer(self, facts: TrainerFacts) -> None: ...

    async def trainer(self) -> TrainerFacts | None: ...

    async def announce_version(self, record: VersionRecord) -> None:
        """Make a version known; an existing name with another content is an error (ValueError)."""

    async def versions(self) -> dict[str, VersionRecord]: ...

    async def new_weights_epoch(self, owner: str, *, above: int = 0) -> int:
        """Claim the next epoch of the weights service, above `above`; every older one is fenced from now on.

        `owner`: who it is, for the message that a fenced one ends with.
        """

    async def hold_weights_epoch(self, epoch: int, owner: str) -> None:
        """Say that this service still serves, also to a store that forgot it; FencedError when a newer one does."""

    async def write_engine(self, facts: EngineFacts) -> None: ...

    async def remove_engine(self, engine_id: str, *, epoch: int = 0) -> None:
        """Forget an engine that left; nothing happens when it is unknown."""

    async def engines(self) -> dict[str, EngineFacts]: ...

    async def change_preferences(
        self, asked: ChangeRequest, *, above: int = 0, min_seconds: float = 0.0
    ) -> PreferenceChange | None:
        """Make one change and its record, atomically; None when there is nothing to do.

        `above`: the newest record the caller knows of; BoardBehindError when the board has less. `min_seconds`: between
        two versions. `apply` makes the earliest scheduled switch that is due take effect, or refuses it when its
        `if_version` is no longer current; it waits while changes are held or too soon. `resume` of what is not held
        is nothing. Else PreferencesHeldError (all but `cancel`, `hold` and `resume`), PreferenceConflictError,
        PreferenceLimitError, ScheduleFullError, UnknownSwitchError.
        """

    async def change_and_follow(
        self, asked: ChangeRequest, *, above: int, min_seconds: float = 0.0
    ) -> list[PreferenceChange]:
        """As `change_preferences`; the records above `above`, ascending, the new one last, in one step.

        Of more than MAX_FOLLOWED before it only the new one; nothing when there is nothing to do.
        """

    async def put_preference(self, document: PreferenceDocument, *, if_version: int | None = None) -> Preference:
        """Store as the next version and make it current: `change_preferences` of a `put` that nobody signs."""

    async def preference(self, version: int | None = None) -> Preference | None:
        """The current preference, or that of `version`."""

    async def preferences(self, *, before: int | None = None, limit: int) -> list[Preference]:
        """At most `limit` versions, newest first; only those below `before`."""

    async def scheduled_preferences(self) -> list[ScheduledPreference]:
        """The switches that wait, in the order in which they were scheduled."""

    async def preference_hold(self) -> Hold: ...

    async def preference_changes(self, after: int) -> list[PreferenceChange]:
        """The records above number `after`, ascending without a gap."""

    async def restore_preferences(self, kept: Kept) -> bool:
        """Bring back what a board has lost, in one step.

        False, and nothing changed, when the board is as new as the newest record and version of these, or newer.
        """

    async def close(self) -> None: ...
