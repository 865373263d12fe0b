"""Spans in a list."""

from __future__ import annotations

from sao.telemetry import metrics
from sao.telemetry.traces.base import Recorded, Tracer


class MemoryTracer(Tracer):
    """Keeps what was recorded until it is closed, at most `most` of it."""

    def __init__(self, share: float = 1.0, *, most: int = 4096) -> None:
        super().__init__(share)
        self._most = most
        self._closed = False
        self.spans: list[Recorded] = []

    def record(self, span: Recorded) -> None:
        if self._closed:
            metrics.SPANS_DROPPED.labels("closed").inc()
        elif len(self.spans) >= self._most:
            metrics.SPANS_DROPPED.labels("queue_full").inc()
        else:
            self.spans.append(span)
            metrics.SPANS_EXPORTED.inc()

    async def close(self) -> None:
        self._closed = True
