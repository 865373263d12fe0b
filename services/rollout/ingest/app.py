"""Wires the ingest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import grpc.aio

from sao import board as boards
from sao import streams as trajectory_streams
from sao.accepted import AcceptedLog
from sao.board.base import Board
from sao.config import RunConfig
from sao.invariants import Limits
from sao.retention import Duty, Retention
from sao.routing import RoutingShape, replayed_routing
from sao.store_memory import read_use
from sao.streams.base import StreamUnavailableError, TrajectoryStreams
from sao.telemetry import traces
from sao.telemetry.health import Health
from sao.telemetry.http import TelemetryServer
from sao.telemetry.logs import get_logger
from sao.v1 import ingest_pb2_grpc
from sao.weights.filesystem import FileSystemVersionStore
from services.rollout.checkpoint import first_checkpoint, vocabulary_size
from services.rollout.ingest import leases, metrics
from services.rollout.ingest.admission import Admission
from services.rollout.ingest.auth import BearerAuth
from services.rollout.ingest.decoding import RefusesUndecodable
from services.rollout.ingest.hangups import LOGGER, HangUps
from services.rollout.ingest.known import KnownVersions
from services.rollout.ingest.leases.base import LeaseLedger
from services.rollout.ingest.pressure import PressureWatch
from services.rollout.ingest.retention import DeadLetterRetention
from services.rollout.ingest.server import IngestServicer

log = get_logger(__name__)

_MIB = 2**20
_GRACE_S = 1.5
_MOST_CALLS = 512
_WATCH_S = 1.0
_STALLED_AFTER_S = 60.0


async def main(config: RunConfig, stop: asyncio.Event) -> None:
    """Serve until `stop`."""
    logging.getLogger(LOGGER).addFilter(HangUps())
    health = Health(stalled_after_s=_STALLED_AFTER_S)
    telemetry = TelemetryServer(health, config.ingest.bind, config.ingest.metrics_port)
    telemetry.start()
    tracer = traces.connect(config, "ingest")
    board = boards.connect(config)
    streams = trajectory_streams.connect(config)
    ledger = leases.connect(config)
    accepted = AcceptedLog(config.run.dir)
    try:
        servicer = make_servicer(config, streams=streams, board=board, ledger=ledger, accepted=accepted, tracer=tracer)
        server, port = make_server(config, servicer)
        await server.start()
        log.info("serving", address=f"{config.ingest.bind}:{port}")
        health.idle("waiting for the first weight version")
        store = FileSystemVersionStore(config.versions_dir, min_free_bytes=0)
        async with retention_of(config, streams).beside():
            checkpoint = await first_checkpoint(store, board, stop)
            if checkpoint is not None:
                routing = replayed_routing(config, checkpoint)
                servicer.open(limits_for(config, vocabulary_size(checkpoint), routing))
                await _watch(streams, ledger, health, PressureWatch(config.redis), stop)
        await server.stop(_GRACE_S)
    finally:
        accepted.close()
        await ledger.close()
        await streams.close()
        await board.close()
        await tracer.close()
        telemetry.close()


def retention_of(config: RunConfig, streams: TrajectoryStreams) -> Retention:
    """What erases dead letters that are over their time; any number of replicas may look at one store."""
    duty = Duty("dead_letters", config.retention.dead_letters_h, DeadLetterRetention(streams, config.redis).erase)
    return Retention([duty], metrics.RETENTION)


def limits_for(config: RunConfig, vocab_size: int, routing: RoutingShape | None = None) -> Limits:
    """What this run accepts."""
    return Limits(
        run=config.run.name,
        vocab_size=vocab_size,
        max_tokens=config.ingest.max_tokens,
        max_bytes=config.ingest.max_message_mb * _MIB,
        logprob_tolerance=config.ingest.logprob_tolerance,
        samples=config.samples,
        routing=routing,
    )


def make_servicer(
    config: RunConfig,
    *,
    streams: TrajectoryStreams,
    board: Board,
    ledger: LeaseLedger,
    accepted: AcceptedLog | None = None,
    tracer: traces.Tracer = traces.OFF,
) -> IngestServicer:
    """The service over these stores; it refuses everything until it is opened."""
    metrics.show_settings(config)
    return IngestServicer(
        config,
        streams=streams,
        ledger=ledger,
        known=KnownVersions(board),
        admission=Admission(streams, board, back_pressure_at=config.redis.back_pressure_at),
        accepted=accepted,
        tracer=tracer,
    )


def make_server(config: RunConfig, servicer: IngestServicer) -> tuple[grpc.aio.Server, int]:
    """A server, not started, and the port it is bound to; OSError when it can't be bound."""
    token = config.auth.token
    # Twice the limit, so that a trajectory somewhat too large is told so by its invariant, not by gRPC.
    limit = 2 * config.ingest.max_message_mb * _MIB
    server = grpc.aio.server(
        interceptors=[*([BearerAuth(token.get_secret_value())] if token else []), RefusesUndecodable()],
        options=[("grpc.max_receive_message_length", limit), ("grpc.so_reuseport", 0)],
        maximum_concurrent_rpcs=_MOST_CALLS,
    )
    ingest_pb2_grpc.add_TrajectoryIngestServiceServicer_to_server(servicer, server)
    address = f"{config.ingest.bind}:{config.ingest.port}"
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        msg = f"ingest can't listen on {address}: is the port taken?"
        raise OSError(msg) from error
    return server, port


async def _watch(
    streams: TrajectoryStreams, ledger: LeaseLedger, health: Health, memory: PressureWatch, stop: asyncio.Event
) -> None:
    """Keep gauges and readiness current: ready while the store answers, alive while this loop turns."""
    health.working("watching the stream store")
    while not stop.is_set():
        try:
            state = await ledger.state(time.time_ns() // 1_000_000)
            use = await read_use(streams)
        except StreamUnavailableError as error:
            health.set_ready(False)
            log.warning("stream store does not answer", error=str(error))
        else:
            metrics.UNCONSUMED.set(use.unconsumed)
            metrics.STORE_MEMORY.set(use.share)
            memory.see(use)
            metrics.LEASES_LIVE.set(state.live)
            metrics.LEASES_EXPIRED.set(state.expired)
            metrics.FRONTIER.set(state.frontier_ordinal)
            health.set_ready(True)
        health.progress()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _WATCH_S)
