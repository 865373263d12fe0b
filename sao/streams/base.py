"""The stream boundary: durable, at-least-once hand-over of trajectories between services.

Invariants every implementation keeps, and tests/contract/test_streams.py checks on all of them:

- **Claim check.** A stream entry is a small `Entry`; the trajectory's bytes lie under a payload key of
  their own until `settle`. Its routed experts, where it has any, lie beside them: they come and go together.
- **Idempotent append.** `append` with an id seen within the horizon changes nothing.
- **Nothing in two places.** A hand-over from one stream to the next is one atomic step that happens only
  if this consumer still owns the delivery (the *fence*): a consumer that was stopped, lost its delivery
  to `claim`, and woke up moves nothing.
- **Nothing is lost.** An entry leaves a stream only by `move`, `settle`, `bury`, or into the waiting room
  (sao.streams.room). Nothing is trimmed by length. A full store refuses (`StreamFullError`), it never evicts.
- **Dead letters are bounded and counted.** A letter leaves them by `requeue_dead`, by `drop_dead`, or, oldest first,
  because all of them together exceed a bound in bytes or its time is over (forgotten); `dead_totals` counts each of
  these by kind.
- **Deliveries are counted.** `Delivery.attempt` rises with each delivery, also across restarts.
- **Pending work is known.** `unconsumed()` counts what is durable and not yet marked consumed, which is what
  admission needs.

Every call may raise StreamUnavailableError; the caller retries with a limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from sao.slots import Slots

if TYPE_CHECKING:
    from sao.streams.room import WaitingRoom


class StreamName(Enum):
    """The hand-overs of a run."""

    TRAJECTORIES = "trajectories"
    SCORED = "scored"


def routed_experts_key(trajectory_id: str) -> str:
    """Where the record of a trajectory's routed experts lies, within the run's keys."""
    return f"routed-experts:{trajectory_id}"


class StreamError(Exception):
    """Base of what this boundary raises."""


class StreamUnavailableError(StreamError):
    """The store did not answer within its deadline."""


class StreamFullError(StreamError):
    """The store is at its memory bound; nothing was written."""


class AppendStatus(Enum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class Entry:
    """What travels on a stream: the id and small text fields, never the payload."""

    trajectory_id: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One entry in this consumer's hands until it is moved, settled, buried, or claimed by another."""

    stream: StreamName
    entry_id: str
    trajectory_id: str
    fields: Mapping[str, str]
    attempt: int
    """How often this entry has been delivered, counting from 1."""

    @property
    def added_ms(self) -> int:
        """Unix time at which the entry came onto its stream, by the store's clock."""
        return int(self.entry_id.partition("-")[0])


LETTER_BYTES = 256
"""What a dead letter counts beside its texts and its payload: the store's own bookkeeping, roughly."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    entry_id: str
    trajectory_id: str
    stream: StreamName
    """Where it was when it was buried, and where `requeue_dead` puts it."""
    fields: Mapping[str, str]
    """What the entry carried there."""
    reason: str
    attempt: int
    buried_ms: int
    size: int
    """Bytes in the store, payload and routed experts included."""

    @property
    def kind(self) -> str:
        """What the reason begins with, up to its first colon."""
        return kind_of(self.reason)


def kind_of(reason: str) -> str:
    """The kind under which a reason is counted."""
    return reason.partition(":")[0]


class RequeueStatus(Enum):
    REQUEUED = "requeued"
    GONE = "gone"
    """It is no dead letter any more: requeued, dropped or forgotten by somebody else."""
    NO_PAYLOAD = "no_payload"
    """Nothing is left to work on; it can only be dropped."""


class DeadEvent(Enum):
    """What happens to dead letters."""

    BURIED = "buried"
    REQUEUED = "requeued"
    DROPPED = "dropped"
    FORGOTTEN = "forgotten"


@dataclass(frozen=True, slots=True)
class DeadTotals:
    size: int
    """Bytes of all letters that are there now."""
    counts: Mapping[DeadEvent, Mapping[str, int]]
    """Since the run began, by kind of reason; an event that never happened has no kinds."""


@dataclass(frozen=True, slots=True)
class StreamDepth:
    length: int
    """Entries on the stream, delivered or not."""
    pending: int
    """Delivered and not yet settled."""
    oldest_age_s: float
    """Age of the oldest entry; 0 when empty."""


FORGOTTEN = "forgotten"
"""Field of the entry that stands on SCORED for an erased trajectory, so that the trainer counts it as dropped; it also
has what is known of `task`, `ordinal` and `sample`."""


@dataclass(frozen=True, slots=True)
class Erased:
    """What was there of one trajectory and is not any more."""

    payload: int = 0
    routed_experts: int = 0
    entries: int = 0
    """On the streams, delivered or not."""
    waiting: int = 0
    """In the waiting room."""
    answers: int = 0
    """Feedback on it."""
    dead_letters: int = 0

    @property
    def anything(self) -> bool:
        """Whether anything was there."""
        return any((self.payload, self.routed_experts, self.entries, self.waiting, self.answers, self.dead_letters))


class TrajectoryStreams(Protocol):
    """All streams of one run."""

    @property
    def room(self) -> WaitingRoom:
        """Where trajectories wait for feedback."""

    async def ping(self) -> None: ...

    async def memory_fraction(self) -> float:
        """Used share of the store's memory bound, 0 when it has none."""

    async def append(
        self,
        trajectory_id: str,
        payload: bytes,
        *,
        ordinal: int,
        sample: int,
        fields: Mapping[str, str],
        routed_experts: bytes = b"",
    ) -> AppendStatus:
        """Make one trajectory durable on TRAJECTORIES, release its lease, mark it unconsumed; all or nothing.

        The first durable trajectory of an (ordinal, sample) wins; a later one is SUPERSEDED. Raises
        StreamFullError at the memory bound, StreamUnavailableError until a trainer has claimed the store (an emptied
        one takes what is done for new), ValueError for an id that is no UUIDv7 or a sample nobody wants.
        """

    async def recognised(self, trajectory_ids: Sequence[str]) -> set[str]:
        """Those of the ids that were appended here within the horizon, whatever became of them."""

    async def restore(self, done: Slots) -> None:
        """Have these slots done as well: a store that lost its file, or came back with an older one, knows too few."""

    async def read(self, stream: StreamName, consumer: str, *, count: int, block_ms: int) -> list[Delivery]:
        """Up to `count` deliveries in order; this consumer's own unsettled ones (from before a restart) first,
        each exactly once per `open_consumer`; waits at most `block_ms`.
        """

    async def open_consumer(self, stream: StreamName, consumer: str) -> None:
        """Start reading as `consumer`: create the group where it is missing, rewind to unsettled deliveries.

        Deliveries handed out before it, also to a process of the same name, are lost once they are read again.
        """

    async def claim(self, stream: StreamName, consumer: str, *, idle_ms: int, count: int) -> list[Delivery]:
        """Take over deliveries that nobody has settled for `idle_ms`, this consumer's own among them."""

    async def newest(self, stream: StreamName, *, count: int) -> list[Entry]:
        """The newest `count` entries, newest first, delivered or not; for looking: nothing is taken."""

    async def payload(self, trajectory_id: str) -> bytes | None:
        """The bytes given to `append`; None when they are gone."""

    async def routed_experts(self, trajectory_id: str) -> bytes | None:
        """The record given to `append`; None when there was none, or it is gone."""

    async def move(self, delivery: Delivery, consumer: str, to: StreamName, fields: Mapping[str, str]) -> bool:
        """Hand the entry over with these fields in one fenced step; False when the delivery was lost."""

    async def bury(self, delivery: Delivery, consumer: str, reason: str) -> bool:
        """Move the entry to the dead letters and release its admission; False when it was lost.

        Payload and routed experts are kept with it, and the oldest letters go where all of them exceed their bound.
        """

    async def mark_consumed(self, trajectory_ids: Sequence[str]) -> None:
        """Release these from `unconsumed` (consumed but not yet settled, or dropped). Repeats change nothing."""

    async def settle(self, deliveries: Sequence[Delivery], consumer: str, *, epoch: int) -> int:
        """Acknowledge and delete entries and payloads whose effect is durable; the number that were still owned.

        A repeat after StreamUnavailableError may find them settled already, and answer less. Refused with
        FencedError when `epoch` is not the newest trainer epoch.
        """

    async def unconsumed(self) -> int: ...

    async def depth(self, stream: StreamName) -> StreamDepth: ...

    async def dead_letters(self, *, count: int, before: str | None = None) -> list[DeadLetter]:
        """The newest `count`, newest first; of those older than the letter with entry id `before`, if it is given."""

    async def requeue_dead(self, letter: DeadLetter) -> RequeueStatus:
        """Put it back, in one step, on the stream it came from: delivered anew, counted as unconsumed again.

        StreamFullError at the memory bound.
        """

    async def drop_dead(self, letter: DeadLetter) -> bool:
        """Delete letter, payload and routed experts; False when it was no dead letter any more."""

    async def forget_dead_before(self, unix_ms: int) -> int:
        """Forget every letter that was buried before this Unix time, and all that is stored of it; how many."""

    async def dead_totals(self) -> DeadTotals: ...

    async def erase(self, trajectory_id: str, mark: Mapping[str, str]) -> Erased:
        """Remove every text of this trajectory, whoever holds it, and have its id recognised as appended.

        Where it was still to be trained, an entry with field FORGOTTEN and those of `mark` takes its place on SCORED.
        Its dead letters are dropped, and counted so. A repeat finds nothing; ValueError for an id that is no UUIDv7.
        """

    async def close(self) -> None: ...


class FencedError(StreamError):
    """A newer trainer epoch exists; this process must stop."""


class StoreEmptiedError(StreamError):
    """The store has forgotten this trainer's epoch or newest facts: it lost its file, or has an older one."""
