"""Wait for a condition inside an event loop, never for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


async def eventually(
    condition: Callable[[], bool | Awaitable[bool]], *, what: str, timeout_s: float = 10.0, poll_s: float = 0.005
) -> None:
    """Return as soon as `condition` holds; AssertionError naming `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value if isinstance(value, bool) else await value:
            return
        if time.monotonic() > deadline:
            msg = f"waited {timeout_s} s for {what}"
            raise AssertionError(msg)
        await asyncio.sleep(poll_s)
