"""The client's side of the ingest contract: channel, stub, token."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import grpc.aio

from sao.config import RunConfig
from sao.v1 import ingest_pb2_grpc

if TYPE_CHECKING:
    Stub = ingest_pb2_grpc.TrajectoryIngestServiceAsyncStub

_MIB = 2**20


def open_channel(config: RunConfig) -> grpc.aio.Channel:
    """A channel to the run's ingest; it connects, and connects again, by itself."""
    options = [
        # Room for a trajectory somewhat too large, so that ingest can say which invariant it violates.
        ("grpc.max_send_message_length", 2 * config.ingest.max_message_mb * _MIB),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    return grpc.aio.insecure_channel(config.ingest.target, options=options)


def make_stub(channel: grpc.aio.Channel) -> Stub:
    """The generated stub, typed as what it is over an asynchronous channel."""
    return cast("Stub", ingest_pb2_grpc.TrajectoryIngestServiceStub(channel))


def call_metadata(config: RunConfig) -> tuple[tuple[str, str], ...]:
    """What every call carries: the bearer token, when the run has one."""
    token = config.auth.token
    return (("authorization", f"Bearer {token.get_secret_value()}"),) if token else ()


def retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    """The server's own hint in `retry-after-ms`, if it gave one."""
    trailer = cast("tuple[tuple[str, str | bytes], ...]", tuple(error.trailing_metadata() or ()))
    for key, value in trailer:
        if key == "retry-after-ms" and str(value).isdecimal():
            return int(str(value)) / 1000
    return None
