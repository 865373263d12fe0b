"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from sao.telemetry.logs import get_logger

AGAIN_S = 0.2
TIMES = 15

log = get_logger(__name__)


async def end(tasks: Iterable[asyncio.Future[Any]], *, again_s: float = AGAIN_S) -> None:
    """Cancel until all have ended, at most TIMES times, `again_s` seconds apart; what is left then is logged.

    Once is not enough: a cancellation that meets the end of the very call that the task waits for may be lost, and
    whoever waits for a task in an endless loop would wait for ever. Results and exceptions are the caller's to read.
    """
    left = {task for task in tasks if not task.done()}
    for _ in range(TIMES):
        if not left:
            return
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=again_s)
    if left:
        log.error("tasks do not end", tasks=[repr(task) for task in left], cancelled_times=TIMES)
