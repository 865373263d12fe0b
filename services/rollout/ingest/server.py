"""TrajectoryIngestService: validate once, append, answer only when durable; lease prompts.

| status | because |
|---|---|
| INVALID_ARGUMENT | an invariant is violated; the text names every one |
| FAILED_PRECONDITION | the id is too old, or too far ahead, for duplicates of it to be recognised |
| RESOURCE_EXHAUSTED | back-pressure; `retry-after-ms` says when to come again |
| UNAVAILABLE | the store does not answer, or no weight version is known yet; `retry-after-ms` as well |
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from sao.accepted import AcceptedLog
from sao.config import RunConfig
from sao.ids import uuid7_unix_ms
from sao.invariants import Limits, routing_violations, unknown_versions, violations
from sao.streams.base import (
    AppendStatus,
    StreamFullError,
    StreamUnavailableError,
    TrajectoryStreams,
    routed_experts_key,
)
from sao.streams.dispatch import slot_of
from sao.telemetry.logs import get_logger
from sao.telemetry.traces import OFF, TRACEPARENT, Tracer, context_of
from sao.v1 import ingest_pb2 as pb
from sao.v1 import ingest_pb2_grpc, trajectory_pb2
from services.rollout.ingest import metrics
from services.rollout.ingest.admission import Admission, show
from services.rollout.ingest.decoding import Undecodable
from services.rollout.ingest.known import KnownVersions
from services.rollout.ingest.leases.base import Lease, LeaseLedger

log = get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
_Request = pb.PublishRequest | pb.PublishStreamRequest

RETRY_AFTER_MS = "retry-after-ms"
_BUSY_RETRY_MS = 500
_FULL_RETRY_MS = 50
_FINISHED_RETRY_MS = 1000
_MAX_LEASES = 1024
_MAX_RENEWALS = 65_536
"""All that a worker holds, in one call; Redis takes a million arguments."""
_MAX_WORKER_ID = 256
_MAX_DETAIL = 4000
_CLOCK_SKEW_H = 1.0
"""How far a worker's clock may be ahead. Less than the two hours by which what was seen outlives the horizon."""
_STATUS = {
    AppendStatus.ACCEPTED: pb.PUBLISH_STATUS_ACCEPTED,
    AppendStatus.DUPLICATE: pb.PUBLISH_STATUS_DUPLICATE,
    AppendStatus.SUPERSEDED: pb.PUBLISH_STATUS_SUPERSEDED,
}


class RefusedError(Exception):
    """A call that gets a status other than OK."""

    def __init__(self, code: grpc.StatusCode, label: str, text: str, retry_after_ms: int = 0) -> None:
        self.code = code
        self.label = label
        """For the metrics."""
        self.retry_after_ms = retry_after_ms
        # It travels in a header: gRPC writes three bytes for each that is not ASCII, and refuses to read 8 KiB.
        super().__init__(text.encode("ascii", "backslashreplace").decode()[:_MAX_DETAIL])


class IngestServicer(ingest_pb2_grpc.TrajectoryIngestServiceServicer):
    """The service over one run's streams, board and ledger; refuses everything until `open`."""

    def __init__(
        self,
        config: RunConfig,
        *,
        streams: TrajectoryStreams,
        ledger: LeaseLedger,
        known: KnownVersions,
        admission: Admission,
        accepted: AcceptedLog | None = None,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        tracer: Tracer = OFF,
    ) -> None:
        self._config = config
        self._streams = streams
        self._ledger = ledger
        self._known = known
        self._admission = admission
        self._accepted = accepted
        self._noting = True
        self._clock_ms = clock_ms
        self._tracer = tracer
        self._limits: Limits | None = None

    def open(self, limits: Limits) -> None:
        """Start serving under these limits."""
        self._limits = limits

    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:  # noqa: N802
        try:
            status = await self._publish(request, _caller(context))
        except RefusedError as refusal:
            await _abort(context, refusal)
        return pb.PublishResponse(id=request.trajectory.id, status=status)

    async def PublishStream(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.PublishStreamRequest | Undecodable], _context: Context
    ) -> AsyncIterator[pb.PublishStreamResponse]:
        async for request in request_iterator:
            if isinstance(request, Undecodable):
                yield _failed("", RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "invalid", request.reason))
                continue
            trajectory_id = request.trajectory.id
            try:
                yield pb.PublishStreamResponse(id=trajectory_id, status=await self._publish(request))
            except RefusedError as refusal:
                yield _failed(trajectory_id, refusal)

    async def LeasePrompts(self, request: pb.LeasePromptsRequest, context: Context) -> pb.LeasePromptsResponse:  # noqa: N802
        try:
            response = await self._lease(request)
        except RefusedError as refusal:
            await _abort(context, refusal)
        show(response.admission)
        return response

    async def RenewLeases(self, request: pb.RenewLeasesRequest, context: Context) -> pb.RenewLeasesResponse:  # noqa: N802
        ttl_ms = round(self._config.ingest.lease_ttl_s * 1000)
        try:
            _check_worker(request.worker_id, "lease_ids", len(request.lease_ids), (0, _MAX_RENEWALS))
            renewed = await self._ledger.renew(
                request.worker_id, request.lease_ids, now_ms=self._clock_ms(), ttl_ms=ttl_ms
            )
        except (StreamUnavailableError, StreamFullError) as error:
            await _abort(context, _store_refusal(error))
        except RefusedError as refusal:
            await _abort(context, refusal)
        metrics.LEASES.labels("renewed").inc(len(renewed))
        metrics.LEASES.labels("lost").inc(len(request.lease_ids) - len(renewed))
        return pb.RenewLeasesResponse(renewed=map(_message, renewed))

    async def _publish(self, request: _Request, caller: str = "") -> pb.PublishStatus.ValueType:
        """`caller`: the traceparent of the call; without one the trajectory's own says where its spans hang."""
        trajectory = request.trajectory
        below = context_of(trajectory.id, caller)
        if not below.span_id:
            below = context_of(trajectory.id, trajectory.traceparent)
        with self._tracer.span("ingest.publish", below) as span:
            span.set(ordinal=trajectory.ordinal, sample=trajectory.sample)
            try:
                status = await self._answered(request)
            except RefusedError as refusal:
                span.set(outcome="refused", reason=refusal.label)
                raise
            span.set(outcome=status.value)
        return _STATUS[status]

    async def _answered(self, request: _Request) -> AppendStatus:
        trajectory = request.trajectory
        try:
            with metrics.PUBLISH_SECONDS.time():
                status = await self._accept(trajectory, request.routed_experts)
        except RefusedError as refusal:
            metrics.TRAJECTORIES.labels(refusal.label).inc()
            # Under back-pressure every call is: pressure.py says it once.
            note = log.debug if refusal.label == "back_pressure" else log.warning
            note("trajectory refused", trajectory=trajectory.id[:64], why=refusal.label, text=str(refusal))
            raise
        metrics.TRAJECTORIES.labels(status.value).inc()
        if status is not AppendStatus.SUPERSEDED:
            self._note(trajectory)
        if status is AppendStatus.ACCEPTED:
            tokens = sum(len(segment.token_ids) for segment in trajectory.segments) + len(trajectory.prompt_token_ids)
            metrics.TRAJECTORY_TOKENS.observe(tokens)
            metrics.LAST_ACCEPTED.set_to_current_time()
        log.info("trajectory published", trajectory=trajectory.id, ordinal=trajectory.ordinal, status=status.value)
        return status

    def _note(self, trajectory: trajectory_pb2.Trajectory) -> None:
        """Write down, before the worker is told, that it is in the store; a duplicate may not be written down yet."""
        if self._accepted is None:
            return
        try:
            self._accepted.note(trajectory.id, slot_of(trajectory.ordinal, trajectory.sample, self._config.samples))
        except OSError as error:
            metrics.UNNOTED.inc()
            if self._noting:
                log.error("accepted, but not written down: a loss of the store would not name it", reason=str(error))  # noqa: TRY400
            self._noting = False
        else:
            self._noting = True

    async def _accept(self, trajectory: trajectory_pb2.Trajectory, routed_experts: bytes) -> AppendStatus:
        limits = self._serving()
        try:
            await self._validate(trajectory, routed_experts, limits)
            used = await self._admission.back_pressure()
            if used is not None:
                text = f"stream store is {used:.0%} full, the mark is {self._config.redis.back_pressure_at:.0%}"
                raise RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "back_pressure", text, _BUSY_RETRY_MS)
            trajectory.routed_experts_key = routed_experts_key(trajectory.id) if routed_experts else ""
            traced = self._tracer.fields(context_of(trajectory.id, trajectory.traceparent))
            return await self._streams.append(
                trajectory.id,
                trajectory.SerializeToString(),
                ordinal=trajectory.ordinal,
                sample=trajectory.sample,
                fields={"task": trajectory.task, "ordinal": str(trajectory.ordinal), **traced},
                routed_experts=routed_experts,
            )
        except (StreamUnavailableError, StreamFullError) as error:
            raise _store_refusal(error) from error

    async def _validate(self, trajectory: trajectory_pb2.Trajectory, routed_experts: bytes, limits: Limits) -> None:
        known = self._known.names
        if unknown_versions(trajectory, known):
            complete = await self._known.complete()
            known = await self._known.refresh()
            if not complete and unknown_versions(trajectory, known):
                msg = "no trainer has claimed it, so its versions may be incomplete; one that starts restores them"
                raise StreamUnavailableError(msg)
        found = [
            *violations(trajectory, limits, known),
            *routing_violations(trajectory, routed_experts, limits),
        ]
        if found:
            for violation in found:
                metrics.VIOLATIONS.labels(violation.code.value).inc()
            text = f"trajectory {trajectory.id[:64]!r} violates " + "; ".join(map(str, found))
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "invalid", text)
        horizon_h = self._config.ingest.seen_horizon_h
        age_h = (self._clock_ms() - uuid7_unix_ms(trajectory.id)) / 3_600_000
        if age_h > horizon_h:
            text = f"trajectory {trajectory.id} is {age_h:.1f} h old, expected at most {horizon_h} h (seen_horizon_h)"
            raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, "expired", text)
        if age_h < -_CLOCK_SKEW_H:
            text = (
                f"trajectory {trajectory.id} is made {-age_h:.1f} h from now, expected at most {_CLOCK_SKEW_H:g} h: "
                "set the worker's clock"
            )
            raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, "not_yet_made", text)

    async def _lease(self, request: pb.LeasePromptsRequest) -> pb.LeasePromptsResponse:
        self._serving()
        _check_worker(request.worker_id, "max_leases", request.max_leases, (1, _MAX_LEASES))
        ingest = self._config.ingest
        now_ms = self._clock_ms()
        try:
            state = await self._admission.state()
            if state == pb.ADMISSION_STATE_FINISHED:
                return pb.LeasePromptsResponse(admission=state, retry_after_ms=_FINISHED_RETRY_MS)
            if state == pb.ADMISSION_STATE_BACK_PRESSURE:
                return pb.LeasePromptsResponse(admission=state, retry_after_ms=_BUSY_RETRY_MS)
            granted = await self._ledger.lease(
                request.worker_id,
                request.max_leases,
                limit=self._config.admission_limit,
                now_ms=now_ms,
                ttl_ms=round(ingest.lease_ttl_s * 1000),
                deadline_ms=now_ms + round(ingest.episode_deadline_s * 1000),
            )
        except StreamFullError:
            state = pb.ADMISSION_STATE_BACK_PRESSURE
            return pb.LeasePromptsResponse(admission=state, retry_after_ms=_BUSY_RETRY_MS)
        except StreamUnavailableError as error:
            raise _store_refusal(error) from error
        metrics.LEASES.labels("granted").inc(sum(lease.attempt == 1 for lease in granted))
        metrics.LEASES.labels("granted_again").inc(sum(lease.attempt > 1 for lease in granted))
        full = len(granted) < request.max_leases
        return pb.LeasePromptsResponse(
            leases=map(_message, granted),
            admission=pb.ADMISSION_STATE_FULL if full else pb.ADMISSION_STATE_OPEN,
            retry_after_ms=_FULL_RETRY_MS if full else 0,
        )

    def _serving(self) -> Limits:
        if self._limits is None:
            text = "the run has no weight version yet, so nothing can be validated; come again"
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, "unavailable", text, _BUSY_RETRY_MS)
        return self._limits


def _caller(context: Context) -> str:
    """The traceparent of a call; none where it has none."""
    found = dict(context.invocation_metadata() or ()).get(TRACEPARENT, "")
    return found if isinstance(found, str) else ""


def _check_worker(worker_id: str, what: str, count: int, bounds: tuple[int, int]) -> None:
    least, most = bounds
    if not 1 <= len(worker_id) <= _MAX_WORKER_ID or not least <= count <= most:
        found = f"worker_id {worker_id[:64]!r} of {len(worker_id)} characters, {what} {count}"
        text = f"{found}; expected a name of 1 to {_MAX_WORKER_ID} characters, and {least} to {most}"
        raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "invalid", text)


def _store_refusal(error: StreamUnavailableError | StreamFullError) -> RefusedError:
    if isinstance(error, StreamFullError):
        metrics.STORE_ERRORS.labels("full").inc()
        return RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "back_pressure", str(error), _BUSY_RETRY_MS)
    metrics.STORE_ERRORS.labels("unavailable").inc()
    text = f"stream store does not answer: {error}"
    return RefusedError(grpc.StatusCode.UNAVAILABLE, "unavailable", text, _BUSY_RETRY_MS)


def _failed(trajectory_id: str, refusal: RefusedError) -> pb.PublishStreamResponse:
    code, text = refusal.code.value[0], str(refusal)
    error = pb.PublishError(code=code, message=text, retry_after_ms=refusal.retry_after_ms)
    return pb.PublishStreamResponse(id=trajectory_id, error=error)


async def _abort(context: Context, refusal: RefusedError) -> NoReturn:
    trailer = ((RETRY_AFTER_MS, str(refusal.retry_after_ms)),) if refusal.retry_after_ms else ()
    await context.abort(refusal.code, str(refusal), trailer)
    raise AssertionError  # abort has raised


def _message(lease: Lease) -> pb.PromptLease:
    return pb.PromptLease(
        lease_id=lease.lease_id,
        ordinal=lease.ordinal,
        sample=lease.sample,
        attempt=lease.attempt,
        expires_ms=lease.expires_ms,
        deadline_ms=lease.deadline_ms,
    )
