"""The waiting room of a run: what is scored but for the feedback of a person or a product, which comes minutes later.

Part of the stream boundary (sao.streams.base), with the same promises; tests/contract/test_room.py checks these on all
implementations:

- **Claim check.** Only ids and small texts lie here; payload and routed experts stay under their keys.
- **Nothing in two places.** `park` takes a delivery off its stream under the fence of `move`; `join` and `bury` take a
  trajectory out again, once, whoever asks first, and only the very parking that the caller has seen.
- **Not counted in admission.** What is parked is released from `unconsumed` for good: its bound is the caller's.
- **An answer is heard.** Feedback that `answer` took is durable; until it is joined, `bury` and a join without it are
  refused. It may come before the trajectory is parked, and is kept until then.
- **One answer.** A second, different one for the same trajectory is refused, as long as the first is remembered.

Every call may raise StreamUnavailableError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

from sao.streams.base import Delivery, StreamName


class Feedback(BaseModel):
    """What somebody has said of one trajectory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float = Field(allow_inf_nan=False)
    """-0.0 is 0.0: the same answer."""
    at_ms: int
    """Unix milliseconds at which it came."""
    author: str = ""
    reason: str = ""

    @field_validator("value")
    @classmethod
    def _one_zero(cls, value: float) -> float:
        return value + 0.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """One parked trajectory."""

    trajectory_id: str
    fields: Mapping[str, str]
    """Given to `park`."""
    since_ms: int
    """Unix milliseconds at which it was parked; tells this parking from another one of the same trajectory."""


class Heard(Enum):
    """What became of an answer."""

    WAITING = "waiting"
    """Its trajectory is parked: `answered` names it until it is joined."""
    KEPT = "kept"
    """Its trajectory is not parked yet, or never will be."""
    JOINED = "joined"
    """A repeat of what was joined before."""
    CONFLICT = "conflict"
    """Another answer was there first."""
    UNKNOWN = "unknown"
    """No such trajectory was appended within the horizon."""
    EXPIRED = "expired"
    """Its trajectory was buried because nothing came."""
    CONSUMED = "consumed"
    """Its trajectory is past the room: the trainer has taken it, or it is a dead letter for another reason."""
    FULL = "full"
    """As many answers are kept as may be; nothing was written."""


@dataclass(frozen=True, slots=True)
class RoomUse:
    """What lies in the room."""

    waiting: int = 0
    oldest_ms: int | None = None
    """Unix milliseconds at which the oldest was parked."""
    kept: int = 0
    """Answers whose trajectory is not there to be joined."""


class WaitingRoom(Protocol):
    """The room of one run; every time is the caller's, in Unix milliseconds."""

    async def park(self, delivery: Delivery, consumer: str, fields: Mapping[str, str], *, now_ms: int) -> bool:
        """Take the delivery off its stream and out of admission, in one fenced step; False when it was lost."""

    async def answer(self, trajectory_id: str, feedback: Feedback, *, kept_max: int) -> Heard:
        """Make an answer durable, or say why not; ValueError for an id that is no UUIDv7.

        At most `kept_max` are kept for trajectories that are not parked.
        """

    async def answered(self, *, count: int) -> list[tuple[Waiting, Feedback]]:
        """Up to `count` parked trajectories whose answer is there, in no particular order."""

    async def waiting(self, *, count: int) -> list[Waiting]:
        """The `count` that wait longest, oldest first, answered or not."""

    async def find(self, trajectory_id: str) -> tuple[Waiting, Feedback] | None:
        """The parked trajectory of this id with its answer; None while it lacks one of the two."""

    async def join(
        self,
        waiting: Waiting,
        fields: Mapping[str, str],
        *,
        now_ms: int,
        answered: bool = True,
        to: StreamName = StreamName.SCORED,
    ) -> bool:
        """Hand it over to a stream with these fields; False when it is not there any more.

        Without `answered` it goes as one that nobody has answered, and stays when an answer has come.
        """

    async def bury(self, waiting: Waiting, reason: str, *, now_ms: int, answered: bool = False) -> bool:
        """Move it to the dead letters of TRAJECTORIES, from where it can be requeued; False when it is not there.

        Without `answered` it goes as one that has expired, and stays when an answer has come.
        """

    async def forget(self, *, kept_before_ms: int, joined_before_ms: int, remembered: int) -> int:
        """Let go of answers that came before `kept_before_ms` and were never joined; how many.

        What was joined, or has expired, is remembered until `joined_before_ms`, and the `remembered` newest at most.
        """

    async def use(self) -> RoomUse: ...
