"""Which prompts are dispatched, and which are done: the state that leases and `append` share.

A *slot* numbers one wanted rollout: `ordinal * samples + sample`. Invariants:

- every slot below `frontier` is done; `winners` holds the done slots at or above it, so it stays small;
- a done slot is never leased again, and a later trajectory for it is superseded;
- a slot in `leases` is not done. Its attempt count survives expiry, until the slot is done.

`Dispatch` is the in-memory form; the Redis form is the keys `cursor`, `frontier`, `winners`, `lease-expiry`
and `leases` of sao.redis_client.RunKeys, changed only by Lua scripts.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Held:
    """One lease, live while `expires_ms` lies in the future."""

    worker_id: str
    attempt: int
    expires_ms: int
    deadline_ms: int


@dataclass(slots=True)
class Dispatch:
    cursor: int = 0
    """The next slot that was never leased."""
    frontier: int = 0
    winners: set[int] = field(default_factory=set)
    leases: dict[int, Held] = field(default_factory=dict)

    def done(self, slot: int) -> bool:
        """Whether a trajectory for this slot is durable."""
        return slot < self.frontier or slot in self.winners

    def finish(self, slot: int) -> None:
        """Record the slot's winner and release its lease."""
        self.leases.pop(slot, None)
        self.winners.add(slot)
        while self.frontier in self.winners:
            self.winners.remove(self.frontier)
            self.frontier += 1


def slot_of(ordinal: int, sample: int, samples: int) -> int:
    """The slot of a rollout; ValueError when the run does not want that sample."""
    if ordinal < 0 or not 0 <= sample < samples:
        msg = f"(ordinal {ordinal}, sample {sample}): expected ordinal >= 0 and sample in 0..{samples - 1}"
        raise ValueError(msg)
    return ordinal * samples + sample
