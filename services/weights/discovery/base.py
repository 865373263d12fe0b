"""The discovery boundary: which engines the fleet has now.

- `look` answers with all of them, or raises DiscoveryError: what could not be asked is never an empty answer, and never
  half of one.
- An engine's id stays the same as long as its address does, and no two have the same.
- The order is that of the addresses, or of the run file's list.
- Every call ends within the implementation's deadline.

tests/contract/test_discovery.py runs on every implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class DiscoveryError(Exception):
    """Nobody knows which engines there are now; those that are known stay."""


@dataclass(frozen=True, order=True)
class Located:
    """An engine, and where it answers."""

    engine_id: str
    url: str


class Discovery(Protocol):
    async def look(self) -> Sequence[Located]: ...
