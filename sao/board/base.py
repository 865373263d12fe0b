"""The board boundary: one place per run for small facts, each with exactly one writer.

| fact | writer | readers |
|---|---|---|
| `TrainerFacts` (update, version, consumed, epoch, state) | trainer | ingest (admission), weights, supervisor |
| `VersionRecord` by name, announced *before* any engine loads it | trainer | ingest (known), trainer (lag), weights |
| `EngineFacts` by engine id | weights | rollout (which engines there are, and in rotation), supervisor |
| `Preference` by version, current version | reward | reward, trainer |

Writes of the trainer and of the weights service carry their epochs and are refused (FencedError) when a newer one of
them has started. Every call may raise StreamUnavailableError (sao.streams.base): the board lives where the streams do.
tests/contract/test_board.py runs on every implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field

from sao.preference import Preference, PreferenceDocument


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

    async def put_preference(self, document: PreferenceDocument, *, if_version: int | None = None) -> Preference:
        """Store as the next version and make it current, atomically.

        With `if_version`, only when that is still the current one (0: none yet), else PreferenceConflictError.
        """

    async def preference(self, version: int | None = None) -> Preference | None:
        """The current preference, or that of `version`."""

    async def restore_preferences(self, preferences: Sequence[Preference]) -> bool:
        """Bring back what a board has lost: these, ascending, the last one current, in one step.

        False, and nothing changed, when the board's current version is as new as the last of these, or newer.
        """

    async def close(self) -> None: ...
