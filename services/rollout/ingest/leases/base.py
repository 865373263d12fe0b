"""The lease ledger boundary: dispatch and admission in one.

Invariants every implementation keeps, and tests/contract/test_leases.py checks on all of them:

- **One holder.** A live (ordinal, sample) is held by one lease; it is given again only after it ran out.
- **Bounded.** At the moment of a grant, live leases + trajectories durable and not yet consumed <= `limit`.
- **Nothing is skipped.** A lease that ran out is given again, before any new ordinal, with `attempt` one higher.
- **Done is done.** A lease ends with its durable trajectory (`TrajectoryStreams.append`); what is done is not leased.

Time comes in as Unix milliseconds of the caller, so several ingest replicas need clocks that agree to well
within the time to live.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Lease:
    lease_id: str
    worker_id: str
    ordinal: int
    sample: int
    attempt: int
    """How often this (ordinal, sample) has been leased, counting from 1."""
    expires_ms: int
    """Unix milliseconds; never past `deadline_ms`."""
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class LedgerState:
    """Numbers for gauges."""

    live: int
    expired: int
    """Ran out and wait to be given again."""
    next_ordinal: int
    """The smallest ordinal that may never have been leased."""
    frontier_ordinal: int
    """Every ordinal below it is done."""


class LeaseLedger(Protocol):
    """The leases of one run; every call may raise StreamUnavailableError."""

    async def lease(
        self, worker_id: str, max_leases: int, *, limit: int, now_ms: int, ttl_ms: int, deadline_ms: int
    ) -> list[Lease]:
        """Up to `max_leases` new leases, fewer where `limit` (RunConfig.admission_limit) asks for it.

        `ttl_ms` is a duration, `deadline_ms` the Unix time past which no renewal reaches; ValueError when the
        deadline is not after `now_ms`. Raises StreamFullError at the store's memory bound, StreamUnavailableError
        until a trainer has claimed the store.
        """

    async def renew(self, worker_id: str, lease_ids: Sequence[str], *, now_ms: int, ttl_ms: int) -> list[Lease]:
        """Extend this worker's leases to `now_ms + ttl_ms`, at most their deadline; those still live, in order."""

    async def state(self, now_ms: int) -> LedgerState: ...

    async def close(self) -> None: ...


def lease_id(slot: int, attempt: int) -> str:
    """The id of one lease of a slot (sao.streams.dispatch)."""
    return f"{slot}-{attempt}"


_LEASE_ID = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")


def parse_lease_id(text: str) -> tuple[int, int] | None:
    """(slot, attempt), or None for an id that this ledger never made."""
    match = _LEASE_ID.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


def check_deadline(now_ms: int, deadline_ms: int) -> None:
    """ValueError when a lease under this deadline would be over before it began."""
    if deadline_ms <= now_ms:
        msg = f"deadline_ms {deadline_ms} is not after now_ms {now_ms}: expected Unix milliseconds, not a duration"
        raise ValueError(msg)
