"""The worker against a real gRPC ingest: leases, attempts, rotation, withholding, draining."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sao.board.base import EngineState, TrainerFacts, TrainerState
from sao.board.memory import MemoryBoard
from sao.invariants import violations
from sao.streams.base import StreamFullError, StreamName
from sao.streams.memory import MemoryStreams
from sao.trajectory import Trajectory
from sao.v1 import trajectory_pb2 as pb
from sao.v1.ingest_pb2 import PublishRequest
from services.rollout.engines.base import EngineAbortedError, EngineError, EngineUnavailableError, StaleCacheError
from tests.support.ingest import FailingStreams, Ingest, memory_ingest
from tests.support.rollout_worker import OBSERVATION, memory_engines, open_spool, working, write_engine
from tests.support.trajectories import VERSIONS, good
from tests.support.waiting import eventually

BIG = "rollout.concurrency=64"


@pytest.fixture
async def ingest() -> AsyncIterator[Ingest]:
    async with memory_ingest(BIG) as opened:
        await write_engine(opened.board, "engine-0")
        yield opened


async def published(ingest: Ingest, count: int) -> list[Trajectory]:
    """The first `count` trajectories on the stream, each consumed so that admission goes on."""
    found: list[Trajectory] = []

    async def enough() -> bool:
        for delivery in await ingest.streams.read(StreamName.TRAJECTORIES, "test", count=64, block_ms=0):
            payload = await ingest.streams.payload(delivery.trajectory_id)
            assert payload is not None
            found.append(Trajectory.from_bytes(payload))
            await ingest.streams.mark_consumed([delivery.trajectory_id])
        return len(found) >= count

    await eventually(enough, what=f"{count} trajectories")
    return found


async def nothing_published(ingest: Ingest) -> bool:
    return (await ingest.streams.depth(StreamName.TRAJECTORIES)).length == 0


async def test_every_ordinal_is_played_once_and_every_trajectory_is_good(ingest: Ingest, tmp_path: Path) -> None:
    engines = memory_engines()
    async with working(ingest, engines, tmp_path, concurrency=8):
        found = await published(ingest, 60)
    ordinals = sorted(trajectory.message.ordinal for trajectory in found)
    assert ordinals[:50] == list(range(50))
    assert max(Counter(ordinals).values()) == 1
    for trajectory in found:
        assert violations(trajectory.message, ingest.limits, VERSIONS) == []
        if trajectory.message.finish_reason == pb.FINISH_REASON_STOP:
            assert trajectory.turns == trajectory.message.ordinal % 3 + 1
        assert all(list(s.token_ids) == OBSERVATION for s in trajectory.message.segments if not s.logprobs)


async def test_each_turn_is_prompted_with_exactly_the_ids_before_it(ingest: Ingest, tmp_path: Path) -> None:
    engines = memory_engines()
    async with working(ingest, engines, tmp_path):
        found = await published(ingest, 20)
    prompts = Counter(tuple(prompt) for prompt in engines["engine-0"].prompts)
    for trajectory in found:
        ids = list(trajectory.message.prompt_token_ids)
        for segment in trajectory.message.segments:
            if segment.kind == pb.SEGMENT_KIND_ACTION:
                assert prompts[tuple(ids)] > 0
                prompts[tuple(ids)] -= 1
            ids.extend(segment.token_ids)
        assert ids == trajectory.token_ids


@pytest.mark.parametrize("kind", [EngineUnavailableError, EngineAbortedError, StaleCacheError])
async def test_a_failed_turn_costs_an_attempt_not_the_ordinal(
    ingest: Ingest, tmp_path: Path, kind: type[EngineError]
) -> None:
    engines = memory_engines()
    engines["engine-0"].failures = [kind("engine-0", "the turn is lost") for _ in range(2)]
    async with working(ingest, engines, tmp_path, concurrency=2):
        found = await published(ingest, 4)
    by_ordinal = {trajectory.message.ordinal: trajectory.message.attempt for trajectory in found}
    assert (by_ordinal[0], by_ordinal[1]) == (2, 2)
    assert by_ordinal[2] == 1


async def test_a_finished_run_is_not_played_on_until_it_is_extended(ingest: Ingest, tmp_path: Path) -> None:
    async def trainer(state: TrainerState) -> None:
        facts = TrainerFacts(epoch=1, update=1, version=VERSIONS[0], consumed=1, state=state)
        await ingest.board.write_trainer(facts)

    await trainer(TrainerState.FINISHED)
    engines = memory_engines()
    async with working(ingest, engines, tmp_path) as running:
        await eventually(lambda: "FINISHED" in running.health.alive()[1], what="the worker to hear of the end")
        assert engines["engine-0"].prompts == []
        await trainer(TrainerState.TRAINING)
        await published(ingest, 1)


async def test_an_unverified_version_withholds_the_turn_until_it_is_verified(ingest: Ingest, tmp_path: Path) -> None:
    engines = memory_engines()
    engines["engine-0"].version = VERSIONS[1]
    async with working(ingest, engines, tmp_path) as running:
        await eventually(lambda: len(engines["engine-0"].prompts) >= 4, what="turns to be sampled")
        await eventually(lambda: running.rotation.load("engine-0") == 0, what="turns to be finished")
        assert await nothing_published(ingest)
        await write_engine(ingest.board, "engine-0", EngineState.VERIFYING)
        assert await nothing_published(ingest)
        await write_engine(ingest.board, "engine-0", EngineState.SERVING, VERSIONS[:2])
        (first, *_) = await published(ingest, 1)
    assert set(first.versions) - {""} == {VERSIONS[1]}


async def test_a_quarantined_engine_gives_its_withheld_turns_up_and_gets_no_more(
    ingest: Ingest, tmp_path: Path
) -> None:
    engines = memory_engines(2)
    engines["engine-0"].version = VERSIONS[2]
    async with working(ingest, engines, tmp_path):
        await eventually(lambda: len(engines["engine-0"].prompts) >= 4, what="turns to be sampled")
        await write_engine(ingest.board, "engine-0", EngineState.QUARANTINED)
        await write_engine(ingest.board, "engine-1")
        found = await published(ingest, 10)
    assert {trajectory.message.engine_id for trajectory in found} == {"engine-1"}
    assert {trajectory.message.attempt for trajectory in found} >= {2}


async def test_no_lease_is_taken_while_no_engine_is_in_rotation(ingest: Ingest, tmp_path: Path) -> None:
    await write_engine(ingest.board, "engine-0", EngineState.STARTING)
    assert isinstance(ingest.streams, MemoryStreams)
    async with working(ingest, memory_engines(), tmp_path) as running:
        await eventually(lambda: "no engine in rotation" in running.health.alive()[1], what="the worker to say why")
        assert not ingest.streams.dispatch.leases
        await write_engine(ingest.board, "engine-0")
        await published(ingest, 1)


async def test_turns_go_to_the_least_loaded_engine_in_rotation(ingest: Ingest, tmp_path: Path) -> None:
    await write_engine(ingest.board, "engine-1")
    await write_engine(ingest.board, "engine-2", EngineState.LOADING)
    engines = memory_engines(3)
    for engine in engines.values():
        engine.pause()
    async with working(ingest, engines, tmp_path, concurrency=6):
        await eventually(
            lambda: len(engines["engine-0"].running) == len(engines["engine-1"].running) == 3,
            what="three turns on each",
        )
        for engine in engines.values():
            engine.resume()
    assert engines["engine-2"].prompts == []


async def test_a_worker_asked_to_stop_waits_no_longer_than_it_may(ingest: Ingest, tmp_path: Path) -> None:
    engines = memory_engines()
    engines["engine-0"].pause()
    async with working(ingest, engines, tmp_path, drain_s=0.2) as running:
        await eventually(lambda: len(engines["engine-0"].running) == 4, what="turns in flight")
        started = time.monotonic()
        running.stop.set()
        await running.task
        assert 0.2 <= time.monotonic() - started < 2
    assert not engines["engine-0"].running


async def test_a_worker_asked_to_stop_publishes_what_it_can_finish(ingest: Ingest, tmp_path: Path) -> None:
    engines = memory_engines()
    engines["engine-0"].pause()
    async with working(ingest, engines, tmp_path, concurrency=3) as running:
        await eventually(lambda: len(engines["engine-0"].running) == 3, what="turns in flight")
        running.stop.set()
        engines["engine-0"].resume()
        await running.task
    assert (await ingest.streams.depth(StreamName.TRAJECTORIES)).length == 3


async def test_a_stop_waits_for_every_episode_as_long_as_it_may_and_for_none_that_is_left(
    ingest: Ingest, tmp_path: Path
) -> None:
    """Leases are renewed meanwhile, no new one is taken, and the last episode's end is the worker's."""
    engines = memory_engines()
    engines["engine-0"].pause()
    assert isinstance(ingest.streams, MemoryStreams)
    leases = ingest.streams.dispatch.leases
    async with working(ingest, engines, tmp_path, concurrency=3, drain_s=60.0, renew_every_s=0.01) as running:
        await eventually(lambda: len(engines["engine-0"].running) == 3, what="turns in flight")
        running.stop.set()
        for lease in leases.values():
            lease.expires_ms -= 5_000
        soon_ms = max(lease.expires_ms for lease in leases.values())
        await eventually(lambda: min(one.expires_ms for one in leases.values()) > soon_ms, what="a renewal")
        assert not running.task.done()
        engines["engine-0"].resume()
        await asyncio.wait_for(running.task, 10)
    assert (await ingest.streams.depth(StreamName.TRAJECTORIES)).length == 3
    assert leases == {}


async def test_a_stop_that_is_cut_short_keeps_what_is_finished_in_the_spool(tmp_path: Path) -> None:
    """As a second signal does: one episode still plays, the other is finished and ingest does not take it."""
    board = MemoryBoard()
    streams = FailingStreams(board)
    async with memory_ingest(BIG, streams=streams, board=board) as ingest:
        await write_engine(board, "engine-0")
        engines = memory_engines()
        engines["engine-0"].pause()
        with contextlib.suppress(asyncio.CancelledError):
            async with working(ingest, engines, tmp_path, concurrency=2, attempts=1000, drain_s=60.0) as running:
                await eventually(lambda: len(engines["engine-0"].running) == 2, what="turns in flight")
                streams.error = StreamFullError("full")
                engines["engine-0"].abort(engines["engine-0"].rids[0])
                running.stop.set()
                engines["engine-0"].resume()
                await eventually(lambda: len(running.spool.ids()) == 1, what="a finished episode")
                engines["engine-0"].pause()
                await eventually(lambda: len(engines["engine-0"].running) == 1, what="the other one's second attempt")
                started = time.monotonic()
                running.task.cancel()
        assert time.monotonic() - started < 5
        assert running.task.cancelled()
        assert not engines["engine-0"].running
        left = await open_spool(tmp_path)
        assert len(left.ids()) == 1
        left.close()


async def test_an_episode_whose_lease_is_lost_is_cancelled_and_its_ordinal_given_again(
    ingest: Ingest, tmp_path: Path
) -> None:
    engines = memory_engines()
    engines["engine-0"].pause()
    assert isinstance(ingest.streams, MemoryStreams)
    leases = ingest.streams.dispatch.leases
    async with working(ingest, engines, tmp_path, concurrency=1, renew_every_s=0.01):
        await eventually(lambda: len(engines["engine-0"].running) == 1, what="a turn in flight")
        leases[0].expires_ms = 0
        await eventually(lambda: len(engines["engine-0"].prompts) == 2, what="the ordinal to be given again")
        engines["engine-0"].resume()
        (first, *_) = await published(ingest, 1)
    assert (first.message.ordinal, first.message.attempt) == (0, 2)


@pytest.mark.parametrize(
    ("spool_bytes", "why"), [(1, "spool is full"), (2**20, "what an earlier process left in the spool")]
)
async def test_no_lease_is_taken_while_the_spool_is_full_or_not_yet_offered(
    ingest: Ingest, tmp_path: Path, spool_bytes: int, why: str
) -> None:
    before = await open_spool(tmp_path)
    waiting = good(random.Random(0), ingest.limits, ordinal=0)
    assert await before.put(PublishRequest(trajectory=waiting))
    before.close()
    engines = memory_engines()
    async with working(ingest, engines, tmp_path, spool_bytes=spool_bytes) as running:
        await eventually(lambda: why in running.health.alive()[1], what="the worker to say why")
        assert engines["engine-0"].prompts == []
        await running.publisher.replay()
        found = await published(ingest, 4)
    ids = {trajectory.message.ordinal: trajectory.id for trajectory in found}
    assert ids[0] == waiting.id, "not superseded by another episode of its prompt"


async def test_what_is_finished_and_not_published_when_the_worker_stops_is_published_by_the_next(
    tmp_path: Path,
) -> None:
    board = MemoryBoard()
    streams = FailingStreams(board)
    async with memory_ingest(BIG, streams=streams, board=board) as ingest:
        await write_engine(board, "engine-0")
        engines = memory_engines()
        engines["engine-0"].pause()
        async with working(ingest, engines, tmp_path, concurrency=3, attempts=1000, drain_s=0.1) as running:
            await eventually(lambda: len(engines["engine-0"].running) == 3, what="turns in flight")
            streams.error = StreamFullError("full")
            engines["engine-0"].resume()
            await eventually(lambda: len(running.spool.ids()) == 3, what="three finished episodes")
        streams.error = None
        async with working(ingest, {}, tmp_path) as running:
            assert len(running.spool.ids()) == 3
            await running.publisher.replay()
            assert running.spool.ids() == []
        assert (await streams.depth(StreamName.TRAJECTORIES)).length == 3
