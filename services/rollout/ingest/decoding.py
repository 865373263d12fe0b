"""Requests whose bytes are no message of their kind: refused like any other invalid request, and alone.

gRPC itself would answer UNKNOWN, which tells a worker to end, and would break off the whole stream that the bytes
came on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from sao.telemetry.logs import get_logger
from services.rollout.ingest import metrics

log = get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Stands in a stream where a request could not be parsed."""

    reason: str


class RefusesUndecodable(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Answers INVALID_ARGUMENT to such a call; in a stream, hands the servicer an `Undecodable` in its place."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler: grpc.RpcMethodHandler[Any, Any] | None = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:  # no such method, or one that reads no request
            return handler  # type: ignore[return-value]  # the stubs know no missing method
        decode, encode = _tolerant(handler.request_deserializer), handler.response_serializer
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(handler.stream_stream, decode, encode)
        return grpc.unary_unary_rpc_method_handler(_refusing(handler.unary_unary), decode, encode)


def _tolerant(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def attempt(data: bytes) -> Any:  # noqa: ANN401 - whatever message the method takes
        try:
            return decode(data)
        except DecodeError as error:
            metrics.UNDECODABLE.inc()
            log.warning("request refused", why="undecodable", text=str(error))
            return Undecodable(f"{len(data)} bytes are no request of this method: {error}")

    return attempt


def _refusing(method: Any) -> Callable[[Any, Context], Awaitable[Any]]:  # noqa: ANN401 - typed as synchronous
    async def behaviour(request: Any, context: Context) -> Any:  # noqa: ANN401 - as the method has them
        if isinstance(request, Undecodable):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.reason)
        return await method(request, context)

    return behaviour
