"""Hands finished trajectories to ingest, until it says that they are durable or that it will never take them.

| answer | what happens |
|---|---|
| ACCEPTED, DUPLICATE, SUPERSEDED | done |
| UNAVAILABLE, DEADLINE_EXCEEDED, back-pressure | again after `retry-after-ms` or a growing pause, `attempts` times in all; then to the spool folder, if there is one, and again from there |
| INVALID_ARGUMENT, FAILED_PRECONDITION, too large | to the dead folder with the reason; repeating it is useless |
| anything else | raised: the installation is wrong (a token, a port), not this trajectory |
"""  # noqa: E501

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

from sao.telemetry.logs import get_logger
from sao.v1 import ingest_pb2 as pb
from services.rollout import metrics
from services.rollout.folder import TrajectoryFolder
from services.rollout.ingest_client import retry_after_s

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


class PublishResult(Enum):
    """What became of one trajectory."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    SUPERSEDED = "superseded"
    DEAD = "dead"
    """Refused for ever; its file lies in the dead folder."""
    SPOOLED = "spooled"
    """On local disk until ingest is back."""
    LOST = "lost"
    """Ingest did not answer and there is no spool folder: its prompt is given out again when the lease ends."""


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
    """Publishes over one channel; any number of trajectories at a time."""

    def __init__(
        self,
        stub: Stub,
        *,
        dead: TrajectoryFolder,
        spool: TrajectoryFolder | None,
        attempts: int,
        call_timeout_s: float,
        metadata: tuple[tuple[str, str], ...] = (),
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        self._stub = stub
        self._dead = dead
        self._spool = spool
        self._attempts = attempts
        self._call_timeout_s = call_timeout_s
        self._metadata = metadata
        self._sleep = sleep

    async def publish(self, request: pb.PublishRequest) -> PublishResult:
        """Offer it until the table above has an answer; AioRpcError for its last row."""
        try:
            with metrics.PUBLISH_SECONDS.time():
                result = await self._offer(request)
        except asyncio.CancelledError:
            # The worker stops while ingest is away. If the last call did arrive, the next offer is a duplicate.
            if self._spool is not None:
                self._spool.put(request)
            raise
        if result is PublishResult.LOST and self._spool is not None:
            self._spool.put(request)
            self._count_spooled()
            result = PublishResult.SPOOLED
        metrics.PUBLISHED.labels(result.value).inc()
        return result

    async def drain_spool(self) -> None:
        """Offer every spooled trajectory again, oldest first, until one is not taken."""
        if self._spool is None:
            return
        for trajectory_id in self._spool.ids():
            result = await self._offer(self._spool.get(trajectory_id))
            if result is PublishResult.LOST:
                break
            self._spool.remove(trajectory_id)
            metrics.PUBLISHED.labels(result.value).inc()
        self._count_spooled()

    async def keep_draining(self, period_s: float = 5.0) -> None:
        """Drain the spool now and every `period_s`, until cancelled."""
        while self._spool is not None:
            await self.drain_spool()
            await asyncio.sleep(period_s)

    async def _offer(self, request: pb.PublishRequest) -> PublishResult:
        retrying = AsyncRetrying(
            retry=retry_if_exception(again),
            wait=_pause,
            stop=stop_after_attempt(self._attempts),
            before_sleep=_count_retry,
            sleep=self._sleep,
            reraise=True,
        )
        try:
            return await retrying(self._call, request)
        except grpc.aio.AioRpcError as error:
            if again(error):
                log.warning("ingest does not take it", trajectory=request.trajectory.id, error=error.details())
                return PublishResult.LOST
            if error.code() not in _NEVER:
                raise
            return self._bury(request, error)

    async def _call(self, request: pb.PublishRequest) -> PublishResult:
        response = await self._stub.Publish(request, timeout=self._call_timeout_s, metadata=self._metadata)
        return _RESULTS[response.status]

    def _bury(self, request: pb.PublishRequest, error: grpc.aio.AioRpcError) -> PublishResult:
        path = self._dead.put(request, f"{error.code().name}: {error.details()}")
        metrics.DEAD.labels(error.code().name).inc()
        log.error("trajectory is dead", trajectory=request.trajectory.id, file=str(path), reason=error.details())
        return PublishResult.DEAD

    def _count_spooled(self) -> None:
        if self._spool is not None:
            metrics.SPOOLED.set(len(self._spool.ids()))


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
