"""The lease ledger inside one process, on the dispatch state of a MemoryStreams."""

from __future__ import annotations

from collections.abc import Sequence

from sao.streams.dispatch import Held
from sao.streams.memory import MemoryStreams
from services.rollout.ingest.leases.base import Lease, LedgerState, check_deadline, lease_id, parse_lease_id


class MemoryLeaseLedger:
    """LeaseLedger for the run of `streams`."""

    def __init__(self, streams: MemoryStreams) -> None:
        self._streams = streams

    async def lease(
        self, worker_id: str, max_leases: int, *, limit: int, now_ms: int, ttl_ms: int, deadline_ms: int
    ) -> list[Lease]:
        check_deadline(now_ms, deadline_ms)
        self._streams.require_claimed()
        dispatch = self._streams.dispatch
        live = sum(held.expires_ms > now_ms for held in dispatch.leases.values())
        free = min(max_leases, limit - live - await self._streams.unconsumed())
        expired = sorted(
            (h.expires_ms, str(slot), slot) for slot, h in dispatch.leases.items() if h.expires_ms <= now_ms
        )
        slots = [slot for _, _, slot in expired][: max(free, 0)]
        while len(slots) < free:
            dispatch.cursor = max(dispatch.cursor, dispatch.frontier)
            if not dispatch.done(dispatch.cursor):
                slots.append(dispatch.cursor)
            dispatch.cursor += 1
        granted = []
        for slot in slots:
            before = dispatch.leases.get(slot)
            attempt = before.attempt + 1 if before else 1
            held = Held(worker_id, attempt, min(now_ms + ttl_ms, deadline_ms), deadline_ms)
            dispatch.leases[slot] = held
            granted.append(self._lease(slot, held))
        return granted

    async def renew(self, worker_id: str, lease_ids: Sequence[str], *, now_ms: int, ttl_ms: int) -> list[Lease]:
        renewed = []
        for text in lease_ids:
            slot, attempt = parse_lease_id(text) or (-1, 0)
            held = self._streams.dispatch.leases.get(slot)
            if held and (held.worker_id, held.attempt) == (worker_id, attempt) and held.expires_ms > now_ms:
                held.expires_ms = min(now_ms + ttl_ms, held.deadline_ms)
                renewed.append(self._lease(slot, held))
        return renewed

    async def state(self, now_ms: int) -> LedgerState:
        dispatch, samples = self._streams.dispatch, self._streams.samples
        live = sum(held.expires_ms > now_ms for held in dispatch.leases.values())
        return LedgerState(
            live=live,
            expired=len(dispatch.leases) - live,
            next_ordinal=max(dispatch.cursor, dispatch.frontier) // samples,
            frontier_ordinal=dispatch.frontier // samples,
        )

    async def close(self) -> None:
        """Nothing to release; the streams belong to the caller."""

    def _lease(self, slot: int, held: Held) -> Lease:
        ordinal, sample = divmod(slot, self._streams.samples)
        return Lease(
            lease_id(slot, held.attempt),
            held.worker_id,
            ordinal,
            sample,
            held.attempt,
            held.expires_ms,
            held.deadline_ms,
        )
