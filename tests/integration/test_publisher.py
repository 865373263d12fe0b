"""The publisher against a real gRPC ingest: what is repeated, for how long, and where the rest goes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from sao.board.memory import MemoryBoard
from sao.config import load_run_config
from sao.ids import uuid7
from sao.streams.base import StreamFullError, StreamName, StreamUnavailableError
from sao.streams.memory import MemoryStreams
from sao.v1 import ingest_pb2 as pb
from sao.v1 import trajectory_pb2
from services.rollout.folder import TrajectoryFolder
from services.rollout.ingest_client import make_stub, open_channel
from services.rollout.publisher import Publisher, PublishResult
from tests.support.ingest import Ingest, memory_ingest
from tests.support.processes import free_port
from tests.support.trajectories import ROUTING, bad, good, routed_experts


class FailingStreams(MemoryStreams):
    """A store that raises what a test puts here, on each call that ingest makes before an append."""

    error: StreamUnavailableError | StreamFullError | None = None

    async def memory_fraction(self) -> float:
        if self.error is not None:
            raise self.error
        return await super().memory_fraction()


def request(message: trajectory_pb2.Trajectory, routed_experts: bytes = b"") -> pb.PublishRequest:
    return pb.PublishRequest(trajectory=message, routed_experts=routed_experts)


class Pauses:
    """Instead of sleeping: the lengths of the pauses, and what happens in each."""

    def __init__(self, then: Callable[[int], None] = lambda _: None) -> None:
        self.lengths: list[float] = []
        self._then = then

    async def sleep(self, seconds: float) -> None:
        self.lengths.append(seconds)
        self._then(len(self.lengths))


def make(ingest: Ingest, folder: Path, pauses: Pauses, *, spool: bool = False, attempts: int = 4) -> Publisher:
    return Publisher(
        ingest.stub,
        dead=TrajectoryFolder(folder / "dead"),
        spool=TrajectoryFolder(folder / "spool") if spool else None,
        attempts=attempts,
        call_timeout_s=5.0,
        sleep=pauses.sleep,
    )


@pytest.mark.parametrize("error", [StreamUnavailableError("gone"), StreamFullError("full")])
async def test_a_store_in_trouble_is_tried_again_after_the_servers_own_hint(
    error: StreamUnavailableError | StreamFullError, tmp_path: Path
) -> None:
    board = MemoryBoard()
    streams = FailingStreams(board)
    streams.error = error

    def recover(pause: int) -> None:
        if pause == 2:
            streams.error = None

    pauses = Pauses(recover)
    async with memory_ingest(streams=streams, board=board) as ingest:
        result = await make(ingest, tmp_path, pauses).publish(request(good(random.Random(0), ingest.limits)))
    assert result is PublishResult.ACCEPTED
    assert len(pauses.lengths) == 2
    assert all(0.5 <= length <= 0.75 for length in pauses.lengths)


async def test_a_trajectory_sent_twice_is_a_duplicate(tmp_path: Path) -> None:
    async with memory_ingest() as ingest:
        publisher = make(ingest, tmp_path, Pauses())
        message = good(random.Random(0), ingest.limits)
        assert await publisher.publish(request(message)) is PublishResult.ACCEPTED
        assert await publisher.publish(request(message)) is PublishResult.DUPLICATE


async def test_an_invalid_trajectory_goes_to_the_dead_folder_with_the_reason_and_is_not_repeated(
    tmp_path: Path,
) -> None:
    pauses = Pauses()
    async with memory_ingest() as ingest:
        message, code = bad("positive_logprob", random.Random(0), ingest.limits)
        assert await make(ingest, tmp_path, pauses).publish(request(message)) is PublishResult.DEAD
    assert pauses.lengths == []
    dead = TrajectoryFolder(tmp_path / "dead")
    assert dead.ids() == [message.id]
    assert dead.get(message.id) == request(message)
    reason = (tmp_path / "dead" / f"{message.id}.txt").read_text()
    assert reason.startswith("INVALID_ARGUMENT: ")
    assert code.value in reason


async def test_an_id_past_the_horizon_and_a_message_past_grpcs_limit_are_dead_too(tmp_path: Path) -> None:
    pauses = Pauses()
    async with memory_ingest() as ingest:
        publisher = make(ingest, tmp_path, pauses)
        old, huge = good(random.Random(0), ingest.limits), good(random.Random(1), ingest.limits)
        old.id = uuid7(unix_ms=1_700_000_000_000)
        huge.task_payload_json = '{"x": "' + "x" * (3 * 2**20) + '"}'
        assert await publisher.publish(request(old)) is PublishResult.DEAD
        assert await publisher.publish(request(huge)) is PublishResult.DEAD
    assert pauses.lengths == []


async def test_without_a_spool_a_silent_ingest_loses_the_trajectory_to_its_lease(tmp_path: Path) -> None:
    pauses = Pauses()
    config = load_run_config(None, [f"ingest.target=127.0.0.1:{free_port()}"], env={})
    async with open_channel(config) as channel:
        publisher = Publisher(
            make_stub(channel),
            dead=TrajectoryFolder(tmp_path / "dead"),
            spool=None,
            attempts=4,
            call_timeout_s=5.0,
            sleep=pauses.sleep,
        )
        assert await publisher.publish(request(good(random.Random(0)))) is PublishResult.LOST
    assert len(pauses.lengths) == 3, "four attempts have three pauses between them"
    assert sorted(pauses.lengths) == pauses.lengths, "they grow"


async def test_a_spooled_trajectory_is_published_with_its_routes_when_the_store_is_back(tmp_path: Path) -> None:
    board = MemoryBoard()
    streams = FailingStreams(board)
    streams.error = StreamUnavailableError("gone")
    async with memory_ingest("trainer.routing_replay=true", streams=streams, board=board) as ingest:
        message = good(random.Random(0), ingest.limits)
        routes = routed_experts(random.Random(0), message, ROUTING)
        publisher = make(ingest, tmp_path, Pauses(), spool=True)
        assert await publisher.publish(request(message, routes)) is PublishResult.SPOOLED
        await publisher.drain_spool()
        spool = TrajectoryFolder(tmp_path / "spool")
        assert spool.ids() == [message.id], "still refused, still here"
        streams.error = None
        await make(ingest, tmp_path, Pauses(), spool=True).drain_spool()
        assert spool.ids() == []
        assert (await streams.depth(StreamName.TRAJECTORIES)).length == 1
        assert await streams.routed_experts(message.id) == routes


async def test_a_wrong_token_stops_the_worker_instead_of_burying_its_work(tmp_path: Path) -> None:
    async with memory_ingest("auth.token=right") as ingest:
        publisher = make(ingest, tmp_path, Pauses(), spool=True)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await publisher.publish(request(good(random.Random(0), ingest.limits)))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not (tmp_path / "dead").exists()


async def test_what_is_being_offered_when_the_worker_stops_waits_in_the_spool(tmp_path: Path) -> None:
    board = MemoryBoard()
    streams = FailingStreams(board)
    streams.error = StreamUnavailableError("gone")
    offered = asyncio.Event()

    async def pause(_: float) -> None:
        offered.set()
        await asyncio.Event().wait()

    async with memory_ingest(streams=streams, board=board) as ingest:
        publisher = make(ingest, tmp_path, Pauses(), spool=True)
        publisher._sleep = pause
        message = good(random.Random(0), ingest.limits)
        offer = asyncio.create_task(publisher.publish(request(message)))
        await asyncio.wait_for(offered.wait(), 10)
        offer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await offer
        streams.error = None
        await make(ingest, tmp_path, Pauses(), spool=True).drain_spool()
        assert (await streams.depth(StreamName.TRAJECTORIES)).length == 1
    assert TrajectoryFolder(tmp_path / "spool").ids() == []
