"""A collector in this process: takes OTLP over gRPC and keeps every span."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from sao.telemetry.traces.base import PREFIX, Recorded, SpanContext, Value


class Receiver(rpc.TraceServiceServicer):
    """What came, by the service that sent it; `held` keeps it from answering."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.spans: list[tuple[str, Recorded]] = []
        self.arrivals = 0
        self._open = threading.Event()
        self._open.set()
        self.endpoint = ""

    def Export(  # noqa: N802
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        self.arrivals += 1
        assert self._open.wait(30)
        self.requests.append(request.SerializeToString())
        for resource in request.resource_spans:
            service = str(_values(list(resource.resource.attributes))["service.name"])
            self.spans += [(service, _recorded(span)) for scope in resource.scope_spans for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def hold(self) -> None:
        self._open.clear()

    def go_on(self) -> None:
        self._open.set()

    def trace(self, trace_id: str) -> list[tuple[str, Recorded]]:
        """Everything of one trace, in the order in which it began."""
        found = [(service, span) for service, span in self.spans if span.context.trace_id == trace_id]
        return sorted(found, key=lambda one: one[1].start_ns)


@contextlib.contextmanager
def receiver() -> Iterator[Receiver]:
    """A collector on a free port."""
    found = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))
    rpc.add_TraceServiceServicer_to_server(found, server)  # type: ignore[no-untyped-call]
    found.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield found
    finally:
        found.go_on()
        server.stop(None).wait(5)


def tree(spans: list[tuple[str, Recorded]]) -> list[str]:
    """A trace as lines, indented by depth."""
    ids = {span.context.span_id for _, span in spans}

    def below(parent: str, depth: int) -> list[str]:
        lines = []
        for service, span in spans:
            if span.parent_id == parent or (not depth and span.parent_id not in ids):
                took_ms = (span.end_ns - span.start_ns) / 1e6
                told = " ".join(f"{name}={value}" for name, value in span.attributes.items())
                failed = f" FAILED {span.failure}" if span.failure else ""
                lines.append(f"{'  ' * depth}{service} {span.name} {took_ms:.1f} ms {told}{failed}")
                lines += below(span.context.span_id, depth + 1)
        return lines

    return below("", 0)


def _recorded(span: OtlpSpan) -> Recorded:
    attributes = _values(list(span.attributes))
    failure = str(attributes.pop("error.type", ""))
    assert bool(failure) == (span.status.code == span.status.STATUS_CODE_ERROR)
    return Recorded(
        span.name,
        SpanContext(span.trace_id.hex(), span.span_id.hex()),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {name.removeprefix(PREFIX): value for name, value in attributes.items()},
        tuple(SpanContext(link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        failure,
    )


def _values(pairs: list[KeyValue]) -> dict[str, Value]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}
