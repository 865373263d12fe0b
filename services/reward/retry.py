"""Patience with the store: a call that it could not answer is repeated for a while, then the error escapes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_delay, wait_exponential

from sao.streams.base import StreamFullError, StreamUnavailableError
from sao.telemetry.logs import get_logger
from services.reward import metrics

T = TypeVar("T")

GIVE_UP_AFTER_S = 60.0
"""A store that is away for longer ends the process; its deliveries are read again when it is back."""
LONGEST_PAUSE_S = 2.0

log = get_logger(__name__)


async def patiently(call: Callable[[], Awaitable[T]], *, give_up_after_s: float = GIVE_UP_AFTER_S) -> T:
    """The result of `call`, repeated while the store is away or full, at most `give_up_after_s` in all."""
    retrying = AsyncRetrying(
        retry=retry_if_exception_type((StreamUnavailableError, StreamFullError)),
        wait=wait_exponential(multiplier=0.05, max=LONGEST_PAUSE_S),
        stop=stop_after_delay(give_up_after_s),
        before_sleep=_note,
        reraise=True,
    )

    async def attempt() -> T:  # tenacity awaits coroutine functions only, not every callable that returns an awaitable
        return await call()

    result: T = await retrying(attempt)
    return result


def _note(state: RetryCallState) -> None:
    metrics.STORE_RETRIES.inc()
    error = state.outcome.exception() if state.outcome else None
    log.warning("store did not take a call, trying again", attempt=state.attempt_number, error=str(error))
