"""The publisher against a real gRPC ingest: what is repeated, for how long, and where the rest goes."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from sao.board.memory import MemoryBoard
from sao.ids import uuid7
from sao.streams.base import StreamFullError, StreamName, StreamUnavailableError
from sao.streams.memory import MemoryStreams
from sao.v1 import ingest_pb2 as pb
from sao.v1 import trajectory_pb2
from services.rollout.folder import TrajectoryFolder
from services.rollout.publisher import Publisher, PublishResult
from tests.support.ingest import FailingStreams, Ingest, memory_ingest
from tests.support.rollout_worker import open_spool
from tests.support.trajectories import ROUTING, bad, good, routed_experts


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


async def make(ingest: Ingest, folder: Path, pauses: Pauses, *, attempts: int = 4) -> Publisher:
    spool = await open_spool(folder)
    return Publisher(ingest.stub, spool=spool, attempts=attempts, call_timeout_s=5.0, sleep=pauses.sleep)


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("services.rollout.folder.write_file", refuse)


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
        publisher = await make(ingest, tmp_path, pauses)
        result = await publisher.publish(request(good(random.Random(0), ingest.limits)))
    assert result is PublishResult.ACCEPTED
    assert len(pauses.lengths) == 2
    assert all(0.5 <= length <= 0.75 for length in pauses.lengths)


async def test_a_trajectory_sent_twice_is_a_duplicate(tmp_path: Path) -> None:
    async with memory_ingest() as ingest:
        publisher = await make(ingest, tmp_path, Pauses())
        message = good(random.Random(0), ingest.limits)
        assert await publisher.publish(request(message)) is PublishResult.ACCEPTED
        assert await publisher.publish(request(message)) is PublishResult.DUPLICATE


async def test_an_invalid_trajectory_goes_to_the_dead_folder_with_the_reason_and_is_not_repeated(
    tmp_path: Path,
) -> None:
    pauses = Pauses()
    async with memory_ingest() as ingest:
        message, code = bad("positive_logprob", random.Random(0), ingest.limits)
        publisher = await make(ingest, tmp_path, pauses)
        assert await publisher.publish(request(message)) is PublishResult.DEAD
    assert pauses.lengths == []
    assert TrajectoryFolder(tmp_path / "spool").ids() == []
    dead = TrajectoryFolder(tmp_path / "dead")
    assert dead.ids() == [message.id]
    assert dead.get(message.id) == request(message)
    reason = (tmp_path / "dead" / f"{message.id}.txt").read_text()
    assert reason.startswith("INVALID_ARGUMENT: ")
    assert code.value in reason


async def test_an_id_past_the_horizon_and_a_message_past_grpcs_limit_are_dead_too(tmp_path: Path) -> None:
    pauses = Pauses()
    async with memory_ingest() as ingest:
        publisher = await make(ingest, tmp_path, pauses)
        old, huge = good(random.Random(0), ingest.limits), good(random.Random(1), ingest.limits)
        old.id = uuid7(unix_ms=1_700_000_000_000)
        huge.task_payload_json = '{"x": "' + "x" * (3 * 2**20) + '"}'
        assert await publisher.publish(request(old)) is PublishResult.DEAD
        assert await publisher.publish(request(huge)) is PublishResult.DEAD
    assert pauses.lengths == []


async def test_what_ingest_does_not_take_waits_in_the_spool_with_its_routes_also_for_the_next_process(
    tmp_path: Path,
) -> None:
    board = MemoryBoard()
    streams = FailingStreams(board)
    streams.error = StreamUnavailableError("gone")
    pauses = Pauses()
    async with memory_ingest("trainer.routing_replay=true", streams=streams, board=board) as ingest:
        message = good(random.Random(0), ingest.limits)
        routes = routed_experts(random.Random(0), message, ROUTING)
        spool = await open_spool(tmp_path)
        publisher = Publisher(ingest.stub, spool=spool, attempts=4, call_timeout_s=5.0, sleep=pauses.sleep)
        assert await publisher.publish(request(message, routes)) is PublishResult.SPOOLED
        assert len(pauses.lengths) == 3, "four attempts have three pauses between them"
        await publisher.replay()
        assert spool.ids() == [message.id], "still refused, still here"
        spool.close()
        streams.error = None
        await (await make(ingest, tmp_path, Pauses())).replay()
        assert TrajectoryFolder(tmp_path / "spool").ids() == []
        assert (await streams.depth(StreamName.TRAJECTORIES)).length == 1
        assert await streams.routed_experts(message.id) == routes


async def test_a_trajectory_is_on_disk_before_it_is_offered_and_gone_after_the_answer(tmp_path: Path) -> None:
    folder = TrajectoryFolder(tmp_path / "spool")
    seen: list[str] = []

    class Watching(MemoryStreams):
        async def memory_fraction(self) -> float:
            seen.extend(folder.ids())
            return 0.0

    board = MemoryBoard()
    async with memory_ingest(streams=Watching(board), board=board) as ingest:
        message = good(random.Random(0), ingest.limits)
        await (await make(ingest, tmp_path, Pauses())).publish(request(message))
    assert set(seen) == {message.id}
    assert folder.ids() == []


async def test_a_replay_leaves_alone_what_an_episode_is_publishing(tmp_path: Path) -> None:
    """Its answer would be a duplicate, and its file would go while the other still counts on it."""
    board = MemoryBoard()
    streams = FailingStreams(board)
    streams.error = StreamUnavailableError("gone")
    pausing, go_on = asyncio.Event(), asyncio.Event()

    async def pause(_: float) -> None:
        pausing.set()
        await go_on.wait()

    async with memory_ingest(streams=streams, board=board) as ingest:
        spool = await open_spool(tmp_path)
        publisher = Publisher(ingest.stub, spool=spool, attempts=2, call_timeout_s=5.0, sleep=pause)
        message = good(random.Random(0), ingest.limits)
        offer = asyncio.create_task(publisher.publish(request(message)))
        await asyncio.wait_for(pausing.wait(), 10)
        streams.error = None
        await publisher.replay()
        assert spool.ids() == [message.id]
        go_on.set()
        assert await offer is PublishResult.ACCEPTED


async def test_a_full_disk_loses_nothing_and_an_absent_ingest_is_waited_for_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = MemoryBoard()
    streams = FailingStreams(board)
    streams.error = StreamUnavailableError("gone")

    def recover(pause: int) -> None:
        if pause == 11:
            streams.error = None

    pauses = Pauses(recover)
    async with memory_ingest(streams=streams, board=board) as ingest:
        publisher = await make(ingest, tmp_path, pauses, attempts=4)
        full_disk(monkeypatch)
        message = good(random.Random(0), ingest.limits)
        assert await publisher.publish(request(message)) is PublishResult.ACCEPTED
    assert len(pauses.lengths) == 11, "three rounds of four attempts, all of them with pauses between"


async def test_a_disk_that_is_well_again_takes_what_was_offered_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = MemoryBoard()
    streams = FailingStreams(board)
    streams.error = StreamUnavailableError("gone")

    def recover(pause: int) -> None:
        if pause == 3:
            monkeypatch.undo()

    async with memory_ingest(streams=streams, board=board) as ingest:
        publisher = await make(ingest, tmp_path, Pauses(recover), attempts=4)
        full_disk(monkeypatch)
        message = good(random.Random(0), ingest.limits)
        assert await publisher.publish(request(message)) is PublishResult.SPOOLED
    assert TrajectoryFolder(tmp_path / "spool").ids() == [message.id]


async def test_what_ingest_refuses_stays_in_the_spool_while_the_dead_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "dead").touch()
    async with memory_ingest() as ingest:
        message, _ = bad("positive_logprob", random.Random(0), ingest.limits)
        spool = await open_spool(tmp_path)
        publisher = Publisher(ingest.stub, spool=spool, attempts=4, call_timeout_s=5.0)
        assert await publisher.publish(request(message)) is PublishResult.DEAD
        assert spool.ids() == [message.id]
        (tmp_path / "dead").unlink()
        await publisher.replay()
        assert spool.ids() == []
    assert TrajectoryFolder(tmp_path / "dead").ids() == [message.id]


async def test_a_wrong_token_stops_the_worker_instead_of_burying_its_work(tmp_path: Path) -> None:
    async with memory_ingest("auth.token=right") as ingest:
        publisher = await make(ingest, tmp_path, Pauses())
        message = good(random.Random(0), ingest.limits)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await publisher.publish(request(message))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not (tmp_path / "dead").exists()
    assert TrajectoryFolder(tmp_path / "spool").ids() == [message.id]


async def test_an_offer_from_memory_that_the_worker_breaks_off_is_written_if_the_disk_takes_it_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = MemoryBoard()
    streams = FailingStreams(board)
    streams.error = StreamUnavailableError("gone")
    offered = asyncio.Event()

    async def pause(_: float) -> None:
        offered.set()
        await asyncio.Event().wait()

    async with memory_ingest(streams=streams, board=board) as ingest:
        spool = await open_spool(tmp_path)
        publisher = Publisher(ingest.stub, spool=spool, attempts=4, call_timeout_s=5.0, sleep=pause)
        full_disk(monkeypatch)
        message = good(random.Random(0), ingest.limits)
        offer = asyncio.create_task(publisher.publish(request(message)))
        await asyncio.wait_for(offered.wait(), 10)
        assert spool.ids() == []
        monkeypatch.undo()
        offer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await offer
    assert TrajectoryFolder(tmp_path / "spool").ids() == [message.id]
