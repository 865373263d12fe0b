"""Spans to an OpenTelemetry collector over OTLP/gRPC. The only module that imports OpenTelemetry.

A thread of its own exports what waits in a bounded queue, at least every `EVERY_S`. What finds the queue full, what the
collector does not take within `traces.timeout_s`, and what is left at the end is dropped, counted and, once in
`SAY_EVERY_S`, said; nothing is ever exported twice on purpose.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import socket
import threading
import time

from opentelemetry.exporter.otlp.proto.grpc import exporter as otlp_exporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace import SpanContext as OtelContext

from sao.config.schema import TracesSection
from sao.telemetry import metrics
from sao.telemetry.logs import get_logger
from sao.telemetry.traces.base import PREFIX, SPANS, Recorded, SpanContext, Tracer

log = get_logger(__name__)

EVERY_S = 1.0
"""Longest time that a span waits for others to travel with."""
BATCH = 512
SAY_EVERY_S = 60.0
CLOSE_S = 1.0
"""What the last export may take."""
_BREAK_OFF_S = 0.25
"""What ends after that: an export whose connection was closed under it."""

_KINDS = {kind: SpanKind[kind.name] for kind in set(SPANS.values())}
_SCOPE = InstrumentationScope("sao")


class OtlpTracer(Tracer):
    """The spans of one process; exports from its construction until `close`."""

    def __init__(self, service: str, run: str, settings: TracesSection) -> None:
        super().__init__(settings.sample)
        # It has a line for each failed attempt; ours is one in a while.
        logging.getLogger(otlp_exporter.__name__).setLevel(logging.CRITICAL)
        self._endpoint = settings.endpoint
        self._exporter = OTLPSpanExporter(endpoint=settings.endpoint, timeout=settings.timeout_s)
        self._resource = Resource.create(
            {
                "service.name": f"sao-{service}",
                "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
                f"{PREFIX}run": run,
            }
        )
        self._waiting: queue.Queue[Recorded] = queue.Queue(settings.queue_spans)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._given_up = threading.Event()
        self._say_at = 0.0
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def record(self, span: Recorded) -> None:
        if self._closing.is_set():
            metrics.SPANS_DROPPED.labels("closed").inc()
            return
        try:
            self._waiting.put_nowait(span)
        except queue.Full:
            metrics.SPANS_DROPPED.labels("queue_full").inc()
            return
        if self._waiting.qsize() >= min(BATCH, self._waiting.maxsize // 2):
            self._wake.set()

    async def close(self) -> None:
        self._closing.set()
        self._wake.set()
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        self._given_up.set()
        self._exporter.shutdown()
        await asyncio.to_thread(self._thread.join, _BREAK_OFF_S)
        if left := len(self._batch(self._waiting.maxsize)):
            metrics.SPANS_DROPPED.labels("closed").inc(left)

    def _run(self) -> None:
        closing = False
        while not closing:
            self._wake.wait(EVERY_S)
            self._wake.clear()
            closing = self._closing.is_set()
            while not self._given_up.is_set() and (batch := self._batch(BATCH)):
                self._export(batch)

    def _batch(self, most: int) -> list[Recorded]:
        found: list[Recorded] = []
        while len(found) < most:
            try:
                found.append(self._waiting.get_nowait())
            except queue.Empty:
                break
        return found

    def _export(self, batch: list[Recorded]) -> None:
        reason = "the collector did not take them in time"
        try:
            if self._exporter.export([self._readable(span) for span in batch]) is SpanExportResult.SUCCESS:
                metrics.SPANS_EXPORTED.inc(len(batch))
                return
        except Exception as error:  # noqa: BLE001 - the thread's edge: traces never end anything
            reason = f"{type(error).__name__}: {error}"
        metrics.SPANS_DROPPED.labels("export_failed").inc(len(batch))
        if time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + SAY_EVERY_S
            log.warning("spans dropped", spans=len(batch), endpoint=self._endpoint, reason=reason)

    def _readable(self, span: Recorded) -> ReadableSpan:
        attributes = {f"{PREFIX}{name}": value for name, value in span.attributes.items()}
        if span.failure:
            attributes["error.type"] = span.failure
        return ReadableSpan(
            span.name,
            context=_context(span.context),
            parent=_context(SpanContext(span.context.trace_id, span.parent_id)) if span.parent_id else None,
            resource=self._resource,
            attributes=attributes,
            links=[Link(_context(one)) for one in span.links],
            kind=_KINDS[SPANS[span.name]],
            status=Status(StatusCode.ERROR) if span.failure else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=_SCOPE,
        )


def _context(place: SpanContext) -> OtelContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return OtelContext(int(place.trace_id, 16), int(place.span_id, 16), is_remote=False, trace_flags=flags)
