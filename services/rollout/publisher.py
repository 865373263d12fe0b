"""Hands finished trajectories to ingest, until it says that they are durable or that it will never take them.

Each is written to the spool before it is first offered, and leaves it only by an answer:

| answer | what happens |
|---|---|
| ACCEPTED, DUPLICATE, SUPERSEDED | done: out of the spool |
| UNAVAILABLE, DEADLINE_EXCEEDED, back-pressure | again after `retry-after-ms` or a growing pause, `attempts` times in all; then it waits in the spool and is offered again from there |
| INVALID_ARGUMENT, FAILED_PRECONDITION, too large | to the dead folder with the reason; repeating it is useless |
| anything else | raised: the installation is wrong (a token, a port), not this trajectory |

One that the spool's disk refuses is offered from memory, without an end, and keeps its episode's place meanwhile.
"""  # noqa: E501

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

from sao.telemetry.logs import get_logger
from sao.telemetry.traces import OFF, Span, Tracer, carried, context_of
from sao.v1 import ingest_pb2 as pb
from services.rollout import metrics
from services.rollout.ingest_client import retry_after_s
from services.rollout.spool import Spool

if TYPE_CHECKING:
    from services.rollout.ingest_client import Stub

log = get_logger(__name__)

_AGAIN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
_NEVER = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,  # only when the message's size is meant: see `again`
}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_REPLAYS = 4
"""Trajectories offered from the spool at a time, beside those of running episodes."""


class PublishResult(Enum):
    """What became of one trajectory."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    SUPERSEDED = "superseded"
    DEAD = "dead"
    """Refused for ever; its file lies in the dead folder."""
    SPOOLED = "spooled"
    """On local disk until ingest is back."""


_RESULTS: Mapping[int, PublishResult] = {
    pb.PUBLISH_STATUS_ACCEPTED: PublishResult.ACCEPTED,
    pb.PUBLISH_STATUS_DUPLICATE: PublishResult.DUPLICATE,
    pb.PUBLISH_STATUS_SUPERSEDED: PublishResult.SUPERSEDED,
}


def again(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # gRPC's own words for a message past its size limit, on either side; it has no other sign.
        return "larger than max" not in (error.details() or "")
    return error.code() in _AGAIN


class Publisher:
    """Publishes over one channel; any number of trajectories at a time. `spool` has been opened."""

    def __init__(
        self,
        stub: Stub,
        *,
        spool: Spool,
        attempts: int,
        call_timeout_s: float,
        metadata: tuple[tuple[str, str], ...] = (),
        sleep: Callable[[float], Any] = asyncio.sleep,
        tracer: Tracer = OFF,
    ) -> None:
        self._stub = stub
        self._spool = spool
        self._attempts = attempts
        self._call_timeout_s = call_timeout_s
        self._metadata = metadata
        self._sleep = sleep
        self._tracer = tracer
        self._in_hand: set[str] = set()
        self._left = bool(spool.ids())
        """By an earlier process, and not yet offered once."""

    @property
    def hold(self) -> str:
        """Why no episode should begin now; nothing when it may.

        What an earlier process left is offered first: played again meanwhile, it would be superseded.
        """
        if self._spool.full:
            return "the spool is full (rollout.spool_mb): ingest takes less than is played"
        if self._left:
            return "offering what an earlier process left in the spool"
        return ""

    async def publish(self, request: pb.PublishRequest) -> PublishResult:
        """Spool it, then offer it until the table above has an answer; AioRpcError for its last row."""
        with self._holding(request.trajectory.id), metrics.PUBLISH_SECONDS.time(), self._span(request) as span:
            try:
                await self._spool.put(request)
                while (result := await self._offer(request)) is PublishResult.SPOOLED:
                    if await self._spool.put(request):
                        break
                    await self._sleep(_LONGEST_PAUSE_S)
            except (asyncio.CancelledError, grpc.aio.AioRpcError):
                # The worker stops. If the last call did arrive, the next offer is a duplicate.
                if not await self._spool.put(request):
                    metrics.PUBLISHED.labels("lost").inc()
                    log.exception("trajectory is lost, its prompt is played again", trajectory=request.trajectory.id)
                raise
            span.set(outcome=result.value)
        metrics.PUBLISHED.labels(result.value).inc()
        return result

    async def replay(self) -> None:
        """Offer everything that waits in the spool, oldest first, until one is not taken."""
        waiting = deque(one for one in self._spool.ids() if one not in self._in_hand)

        async def offer_in_turn() -> None:
            while waiting:
                if await self._offer_again(waiting.popleft()) is PublishResult.SPOOLED:
                    waiting.clear()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(_REPLAYS, len(waiting))):
                group.create_task(offer_in_turn())
        self._left = False

    async def keep_replaying(self, period_s: float = 5.0) -> None:
        """Replay now and every `period_s`, until cancelled; take the spool's folder when its disk is well again."""
        while True:
            await self._spool.open()
            await self.replay()
            await asyncio.sleep(period_s)

    async def _offer_again(self, trajectory_id: str) -> PublishResult | None:
        with self._holding(trajectory_id):
            request = await self._spool.get(trajectory_id)
            if request is None:
                return None
            with self._span(request) as span:
                result = await self._offer(request)
                span.set(outcome=result.value)
        if result is not PublishResult.SPOOLED:
            metrics.PUBLISHED.labels(result.value).inc()
        return result

    def _span(self, request: pb.PublishRequest) -> Span:
        return self._tracer.span("publish", context_of(request.trajectory.id, request.trajectory.traceparent))

    @contextlib.contextmanager
    def _holding(self, trajectory_id: str) -> Iterator[None]:
        """No replay offers it meanwhile."""
        self._in_hand.add(trajectory_id)
        try:
            yield
        finally:
            self._in_hand.discard(trajectory_id)

    async def _offer(self, request: pb.PublishRequest) -> PublishResult:
        """Ingest's answer, acted upon; SPOOLED when it does not take it now."""
        retrying = AsyncRetrying(
            retry=retry_if_exception(again),
            wait=_pause,
            stop=stop_after_attempt(self._attempts),
            before_sleep=_count_retry,
            sleep=self._sleep,
            reraise=True,
        )
        try:
            result: PublishResult = await retrying(self._call, request)
        except grpc.aio.AioRpcError as error:
            if again(error):
                log.warning("ingest does not take it", trajectory=request.trajectory.id, error=error.details())
                return PublishResult.SPOOLED
            if error.code() not in _NEVER:
                raise
            await self._bury(request, error)
            return PublishResult.DEAD
        await self._spool.remove(request.trajectory.id)
        return result

    async def _call(self, request: pb.PublishRequest) -> PublishResult:
        metadata = (*self._metadata, *carried())
        response = await self._stub.Publish(request, timeout=self._call_timeout_s, metadata=metadata)
        return _RESULTS[response.status]

    async def _bury(self, request: pb.PublishRequest, error: grpc.aio.AioRpcError) -> None:
        reason = f"{error.code().name}: {error.details()}"
        metrics.DEAD.labels(error.code().name).inc()
        log.error("trajectory is dead", trajectory=request.trajectory.id, reason=reason)
        await self._spool.bury(request, reason)


def _pause(state: RetryCallState) -> float:
    """The server's hint or a doubling pause, and up to half as much again so that workers spread out."""
    error = state.outcome.exception() if state.outcome else None
    hint = retry_after_s(error) if isinstance(error, grpc.aio.AioRpcError) else None
    base = hint or min(_FIRST_PAUSE_S * 2 ** (state.attempt_number - 1), _LONGEST_PAUSE_S)
    return base * random.uniform(1.0, 1.5)  # noqa: S311 - jitter


def _count_retry(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, grpc.aio.AioRpcError):
        metrics.PUBLISH_RETRIES.labels(error.code().name).inc()
