"""Prompt leases: dispatch and admission; base.py is the contract."""

from __future__ import annotations

from sao.config.schema import RunConfig
from services.rollout.ingest.leases.base import Lease, LeaseLedger, LedgerState


def connect(config: RunConfig) -> LeaseLedger:
    """The run's ledger in its Redis."""
    from services.rollout.ingest.leases.redis import RedisLeaseLedger

    return RedisLeaseLedger.connect(config)


__all__ = ["Lease", "LeaseLedger", "LedgerState", "connect"]
