"""Which trajectories feedback is asked for: the same on every replica and after every restart."""

from __future__ import annotations

import hashlib


def asked(trajectory_id: str, share: float) -> bool:
    """Whether this one is among the share; whoever is in a share is in every larger one, and 1 is everybody."""
    digest = hashlib.blake2b(trajectory_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
