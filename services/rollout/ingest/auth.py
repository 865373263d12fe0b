"""Bearer tokens on gRPC."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio


class BearerAuth(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Answers UNAUTHENTICATED to every call without `authorization: Bearer <token>`."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refusal = grpc.unary_unary_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        found = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        given = found if isinstance(found, bytes) else found.encode()
        if hmac.compare_digest(given, self._expected):
            return await continuation(handler_call_details)
        return self._refusal


async def _refuse(_request: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "missing or wrong bearer token, expected auth.token of the run"
    )
    raise AssertionError  # abort has raised
