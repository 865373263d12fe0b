"""A real gRPC ingest in this process, over whatever streams a test has."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sao.board.base import Board, VersionRecord
from sao.board.memory import MemoryBoard
from sao.config import RunConfig, load_run_config
from sao.invariants import Limits
from sao.streams.base import StreamFullError, StreamUnavailableError, TrajectoryStreams
from sao.streams.memory import MemoryStreams
from sao.telemetry.traces import OFF, Tracer
from services.rollout.ingest.app import limits_for, make_server, make_servicer
from services.rollout.ingest.leases.base import LeaseLedger
from services.rollout.ingest.leases.memory import MemoryLeaseLedger
from services.rollout.ingest_client import call_metadata, make_stub, open_channel
from tests.support.trajectories import ROUTING, VERSIONS

if TYPE_CHECKING:
    from services.rollout.ingest_client import Stub

VOCAB = 32


@dataclass(frozen=True)
class Ingest:
    """A serving ingest and what lies behind it."""

    config: RunConfig
    """With `ingest.target` filled in."""
    stub: Stub
    limits: Limits
    streams: TrajectoryStreams
    board: Board

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return call_metadata(self.config)


class FailingStreams(MemoryStreams):
    """A store that raises what a test puts here, on each call that ingest makes before an append."""

    error: StreamUnavailableError | StreamFullError | None = None

    async def memory_fraction(self) -> float:
        if self.error is not None:
            raise self.error
        return await super().memory_fraction()


async def announce(board: Board, *versions: str) -> None:
    """Make these versions known, as a trainer of epoch 1."""
    for update, name in enumerate(versions):
        await board.announce_version(VersionRecord(name=name, update=update, parent=None, epoch=1))


@contextlib.asynccontextmanager
async def serving(
    config: RunConfig,
    streams: TrajectoryStreams,
    board: Board,
    ledger: LeaseLedger,
    *,
    opened: bool = True,
    announced: Sequence[str] = VERSIONS,
    tracer: Tracer = OFF,
) -> AsyncIterator[Ingest]:
    """The ingest on a free port, open unless told otherwise, with these versions announced."""
    if await board.epoch() == 0:
        await board.new_trainer_epoch()
    await announce(board, *announced)
    servicer = make_servicer(config, streams=streams, board=board, ledger=ledger, tracer=tracer)
    limits = limits_for(config, VOCAB, ROUTING if config.trainer.routing_replay else None)
    if opened:
        servicer.open(limits)
    server, port = make_server(config, servicer)
    await server.start()
    dialled = config.model_copy(update={"ingest": config.ingest.model_copy(update={"target": f"127.0.0.1:{port}"})})
    try:
        async with open_channel(dialled) as channel:
            yield Ingest(dialled, make_stub(channel), limits, streams, board)
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def memory_ingest(
    *sets: str, streams: MemoryStreams | None = None, board: MemoryBoard | None = None, opened: bool = True
) -> AsyncIterator[Ingest]:
    """The ingest over in-memory twins."""
    board = board or MemoryBoard()
    board.claimed = True
    streams = streams or MemoryStreams(board)
    config = load_run_config(None, ["ingest.max_message_mb=1", "ingest.max_tokens=512", *sets], env={})
    async with serving(config, streams, board, MemoryLeaseLedger(streams), opened=opened) as ingest:
        yield ingest
