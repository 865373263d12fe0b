"""Ride out a stream store that does not answer, or is full, for a while, with a limit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from sao.streams.base import StreamFullError, StreamUnavailableError
from sao.telemetry.logs import get_logger
from services.trainer import metrics

log = get_logger(__name__)

GIVE_UP_AFTER_S = 60.0
"""An outage longer than this ends the process; what is unsettled is delivered again to its successor."""

T = TypeVar("T")


async def ride_out(call: Callable[[], Awaitable[T]], *, give_up_after_s: float = GIVE_UP_AFTER_S) -> T:
    """The result of `call`, repeated (so it must be idempotent) while the store is away or full."""

    async def attempt() -> T:
        return await call()

    retrying = AsyncRetrying(
        retry=retry_if_exception_type((StreamUnavailableError, StreamFullError)),
        stop=stop_after_delay(give_up_after_s),
        wait=wait_exponential_jitter(multiplier=0.05, max=2.0),
        before_sleep=_note,
        reraise=True,
    )
    return await retrying(attempt)


def _note(state: RetryCallState) -> None:
    metrics.OUTAGES.inc()
    error = state.outcome.exception() if state.outcome is not None else None
    log.warning("stream store unavailable or full, trying again", attempt=state.attempt_number, reason=str(error))
