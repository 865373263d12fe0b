"""In-memory twin: a test says which addresses there are, and when nobody answers."""

from __future__ import annotations

from collections.abc import Sequence

from services.weights.discovery.base import DiscoveryError, Located


class MemoryDiscovery:
    """Names engines by their addresses."""

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        self.addresses = list(addresses)
        self.answers = True

    async def look(self) -> Sequence[Located]:
        if not self.answers:
            msg = "nobody answers"
            raise DiscoveryError(msg)
        return [Located(f"engine-{address}", f"memory://{address}") for address in sorted(set(self.addresses))]
