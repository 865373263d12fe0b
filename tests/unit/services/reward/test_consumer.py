from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from sao.board.memory import MemoryBoard
from sao.config.schema import RewardSection
from sao.outcome import Scored
from sao.preference import PreferenceDocument
from sao.streams.base import Delivery, StreamDepth, StreamFullError, StreamName, StreamUnavailableError
from sao.streams.memory import MemoryStreams
from sao.tasks.base import Task, UnscorableError
from sao.tasks.calculator import Calculator
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from sao.telemetry.health import Health
from sao.trajectory import Trajectory
from services.reward.consumer import Consumer
from services.reward.scorer import TrajectoryScorer
from services.reward.scorers.base import ScoringRequest
from services.reward.scorers.memory import MemoryScorer
from tests.support.scored_tasks import SETTINGS, SteeredTask, always, append, outcomes_of, scored, until

NO_TRUTH = UnscorableError("no truth")
JUDGE_DOWN = ConnectionError("judge is down")
TOKENIZER = tokenizer_of_run(None, Calculator())


@contextlib.asynccontextmanager
async def consuming(
    streams: MemoryStreams,
    task: Task,
    settings: RewardSection = SETTINGS,
    *,
    board: MemoryBoard | None = None,
    health: Health | None = None,
) -> AsyncIterator[asyncio.Task[None]]:
    """A consumer at work until the block ends."""
    board = board or MemoryBoard()
    if await board.preference() is None:
        await board.put_preference(task.default_preference)
    scorer = TrajectoryScorer(task, TOKENIZER, board.preference, settings)
    stop = asyncio.Event()
    running = asyncio.ensure_future(Consumer(streams, scorer, settings, health or Health(60.0)).run(stop))
    try:
        yield running
    finally:
        stop.set()
        await asyncio.wait_for(running, 20)


async def buried(streams: MemoryStreams, count: int = 1) -> list[str]:
    """The reasons of the dead letters, once there are `count`."""
    await until(lambda: len(streams._dead) >= count, f"{count} dead letters")
    return [letter.reason for letter in await streams.dead_letters(count=100)]


async def test_trajectories_move_to_scored_with_outcome_and_their_own_fields() -> None:
    streams = MemoryStreams()
    ids = await append(streams, 10)
    async with consuming(streams, always(correct=1.0)):
        pairs = await scored(streams, 10)
    assert sorted(outcomes_of(pairs)) == sorted(ids)
    for delivery, outcome in pairs:
        assert isinstance(outcome, Scored)
        assert outcome.value == 1.0
        assert delivery.fields["task"] == "steered"
        assert ids[int(delivery.fields["ordinal"])] == delivery.trajectory_id
    assert (await streams.depth(StreamName.TRAJECTORIES)).length == 0
    assert await streams.unconsumed() == 10


async def test_an_invalid_trajectory_is_buried_at_once_with_the_reason() -> None:
    def score(_: Trajectory) -> Mapping[str, float]:
        raise NO_TRUTH

    streams = MemoryStreams()
    await append(streams, 1)
    async with consuming(streams, SteeredTask(score)):
        assert await buried(streams) == ["invalid: score: no truth"]
    assert (await streams.dead_letters(count=1))[0].attempt == 1
    assert (await streams.depth(StreamName.SCORED)).length == 0
    assert await streams.unconsumed() == 0


async def test_a_failure_is_tried_again_until_it_passes() -> None:
    tries = 0

    def score(_: Trajectory) -> Mapping[str, float]:
        nonlocal tries
        tries += 1
        if tries < SETTINGS.max_deliveries:
            raise JUDGE_DOWN
        return {"correct": 0.0, "style": 1.0}

    streams = MemoryStreams()
    await append(streams, 1)
    async with consuming(streams, SteeredTask(score)):
        [(_, outcome)] = await scored(streams, 1)
    assert isinstance(outcome, Scored)
    assert tries == SETTINGS.max_deliveries


async def test_a_failure_that_stays_is_buried_after_the_last_delivery_and_never_scored() -> None:
    def score(_: Trajectory) -> Mapping[str, float]:
        raise JUDGE_DOWN

    streams = MemoryStreams()
    await append(streams, 2)
    async with consuming(streams, SteeredTask(score)):
        reasons = await buried(streams, 2)
    assert reasons == ["infra_failed: score: ConnectionError: judge is down; delivery 3 was the last"] * 2
    assert (await streams.depth(StreamName.SCORED)).length == 0


async def test_a_hanging_scorer_is_buried_as_a_timeout() -> None:
    release = threading.Event()

    def hang(_: Trajectory) -> Mapping[str, float]:
        release.wait(20)
        return {}

    settings = SETTINGS.model_copy(update={"component_timeout_s": 0.02, "max_deliveries": 2, "threads": 2})
    streams = MemoryStreams()
    await append(streams, 1)
    async with consuming(streams, SteeredTask(hang), settings):
        assert await buried(streams) == ["timeout: score took longer than 0.02 s; delivery 2 was the last"]
        release.set()


async def test_a_pool_full_of_hanging_threads_stops_the_work_instead_of_burying_it() -> None:
    release, now = threading.Event(), 0.0
    health = Health(60.0, clock=lambda: now)

    def hang(_: Trajectory) -> Mapping[str, float]:
        release.wait(20)
        return {"correct": 1.0, "style": 1.0}

    settings = SETTINGS.model_copy(update={"component_timeout_s": 0.02, "claim_idle_s": 60.0, "threads": 1})
    streams = MemoryStreams()
    ids = await append(streams, 3)
    async with consuming(streams, SteeredTask(hang), settings, health=health):
        await until(lambda: "2 trajectories" in health.alive()[1], "the first to time out")
        now = 61.0
        alive, sentence = health.alive()
        assert not alive
        assert "stalled" in sentence
        assert await streams.dead_letters(count=1) == []
        release.set()
        assert set(outcomes_of(await scored(streams, 2))) == set(ids[1:])


async def test_a_trajectory_that_ends_the_process_each_time_is_buried() -> None:
    streams = MemoryStreams()
    await append(streams, 1)
    for _ in range(SETTINGS.max_deliveries):
        await streams.open_consumer(StreamName.TRAJECTORIES, SETTINGS.consumer)
        await streams.read(StreamName.TRAJECTORIES, SETTINGS.consumer, count=1, block_ms=0)
    settings = SETTINGS.model_copy(update={"claim_idle_s": 60.0})
    async with consuming(streams, always(), settings):
        assert await buried(streams) == ["invalid: delivered 4 times, and no delivery came to an outcome"]


async def test_a_missing_payload_is_buried(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = MemoryStreams()
    await append(streams, 1)

    async def gone(_: str) -> None:
        return None

    monkeypatch.setattr(streams, "payload", gone)
    async with consuming(streams, always()):
        assert await buried(streams) == ["invalid: its payload is gone from the store"]


async def test_unfinished_work_of_the_last_life_is_scored_first() -> None:
    streams = MemoryStreams()
    first = await append(streams, 2)
    await streams.open_consumer(StreamName.TRAJECTORIES, SETTINGS.consumer)
    await streams.read(StreamName.TRAJECTORIES, SETTINGS.consumer, count=2, block_ms=0)
    later = await append(streams, 2, first_ordinal=2)
    settings = SETTINGS.model_copy(update={"claim_idle_s": 60.0, "batch": 1})
    async with consuming(streams, always(), settings):
        pairs = await scored(streams, 4)
    assert [delivery.trajectory_id for delivery, _ in pairs] == first + later


async def test_work_of_a_dead_neighbour_is_taken_over() -> None:
    streams = MemoryStreams()
    ids = await append(streams, 3)
    await streams.open_consumer(StreamName.TRAJECTORIES, "reward-7")
    await streams.read(StreamName.TRAJECTORIES, "reward-7", count=3, block_ms=0)
    async with consuming(streams, always()):
        assert set(outcomes_of(await scored(streams, 3))) == set(ids)


async def test_a_delivery_lost_to_a_neighbour_is_thrown_away() -> None:
    started, release = threading.Event(), threading.Event()

    def score(_: Trajectory) -> Mapping[str, float]:
        started.set()
        release.wait(20)
        return {"correct": 1.0, "style": 1.0}

    streams = MemoryStreams()
    [trajectory_id] = await append(streams, 1)
    settings = SETTINGS.model_copy(update={"claim_idle_s": 60.0})
    async with consuming(streams, SteeredTask(score), settings):
        await until(started.is_set, "scoring to start")
        [stolen] = await streams.claim(StreamName.TRAJECTORIES, "reward-7", idle_ms=0, count=1)
        release.set()
        await asyncio.sleep(0)
    assert (await streams.depth(StreamName.SCORED)).length == 0
    assert stolen.trajectory_id == trajectory_id
    assert await streams.move(stolen, "reward-7", StreamName.SCORED, {})


async def test_a_slow_scoring_that_this_consumer_claims_from_itself_runs_once_and_counts() -> None:
    runs, release = 0, threading.Event()

    def score(_: Trajectory) -> Mapping[str, float]:
        nonlocal runs
        runs += 1
        release.wait(20)
        return {"correct": 1.0, "style": 1.0}

    claims = 0

    class Watched(MemoryStreams):
        async def claim(self, *args: Any, **kwargs: Any) -> list[Delivery]:
            nonlocal claims
            found = await super().claim(*args, **kwargs)
            claims += len(found)
            return found

    streams = Watched()
    await append(streams, 1)
    async with consuming(streams, SteeredTask(score)):
        await until(lambda: claims >= 2, "the consumer to claim its own delivery twice")
        release.set()
        await scored(streams, 1)
    assert runs == 1


async def test_a_slow_trajectory_does_not_hold_up_the_others() -> None:
    release = threading.Event()
    slow: list[str] = []

    def score(trajectory: Trajectory) -> Mapping[str, float]:
        if trajectory.id in slow:
            release.wait(20)
        return {"correct": 1.0, "style": 1.0}

    streams = MemoryStreams()
    slow += await append(streams, 1)
    quick = await append(streams, 12, first_ordinal=1)
    settings = SETTINGS.model_copy(update={"claim_idle_s": 60.0})
    async with consuming(streams, SteeredTask(score), settings):
        assert set(outcomes_of(await scored(streams, 12))) == set(quick)
        release.set()
        assert set(outcomes_of(await scored(streams, 1))) == set(slow)


@pytest.mark.parametrize("error", [StreamUnavailableError("not now"), StreamFullError("not now")], ids=repr)
@pytest.mark.parametrize("call", ["open_consumer", "read", "claim", "payload", "move", "depth"])
async def test_a_store_that_fails_for_a_moment_costs_nothing(
    call: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = MemoryStreams()
    whole, failures = getattr(streams, call), 2

    async def flaky(*args: Any, **kwargs: Any) -> Any:
        nonlocal failures
        if failures and "trainer" not in args:
            failures -= 1
            raise error
        return await whole(*args, **kwargs)

    monkeypatch.setattr(streams, call, flaky)
    ids = await append(streams, 3)
    async with consuming(streams, always()):
        assert set(outcomes_of(await scored(streams, 3))) == set(ids)
    assert failures == 0


async def test_it_is_ready_once_the_group_is_open_and_idle_when_the_work_is_done() -> None:
    streams, health = MemoryStreams(), Health(60.0)
    assert not health.ready()[0]
    await append(streams, 2)
    async with consuming(streams, always(), health=health):
        await scored(streams, 2)
        await until(lambda: "no trajectory is waiting" in health.alive()[1], "the service to be idle")
        assert health.ready()[0]
    assert not health.ready()[0]


READS_JUDGE = PreferenceDocument(name="judged", weights={"humour": 1.0})
READS_STYLE = PreferenceDocument(name="plain", weights={"style": 1.0})


class HeldJudge:
    """A judge that holds every call until the test releases it."""

    def __init__(self, concurrency: int) -> None:
        self.release = asyncio.Event()
        self.running = self.most = 0
        self.scorer = MemoryScorer(
            "critic", {"humour": "text"}, self._answer, deadline_s=20.0, concurrency=concurrency, judges=True
        )

    async def _answer(self, _: ScoringRequest) -> Mapping[str, float]:
        self.running += 1
        self.most = max(self.most, self.running)
        await self.release.wait()
        self.running -= 1
        return {"humour": 0.5}


@contextlib.asynccontextmanager
async def consuming_with(
    judge: HeldJudge, streams: MemoryStreams, board: MemoryBoard, settings: RewardSection
) -> AsyncIterator[Counter[str]]:
    """A consumer whose judge is held; counts how often the task scored each trajectory."""
    counted: Counter[str] = Counter()

    def score(one: Trajectory) -> Mapping[str, float]:
        counted[one.id] += 1
        return {"correct": 1.0, "style": 0.25}

    scorer = TrajectoryScorer(SteeredTask(score), TOKENIZER, board.preference, settings, scorers=[judge.scorer])
    stop = asyncio.Event()
    running = asyncio.ensure_future(Consumer(streams, scorer, settings, Health(60.0)).run(stop))
    try:
        yield counted
    finally:
        stop.set()
        judge.release.set()
        await asyncio.wait_for(running, 20)


async def test_a_judge_that_hangs_holds_up_what_reads_it_to_its_bound_and_nothing_else() -> None:
    settings = SETTINGS.model_copy(update={"claim_idle_s": 60.0, "batch": 2})
    looks = 0

    class Watched(MemoryStreams):
        async def depth(self, stream: StreamName) -> StreamDepth:
            nonlocal looks
            looks += 1
            return await super().depth(stream)

    streams, board, judge = Watched(), MemoryBoard(), HeldJudge(concurrency=6)
    await board.put_preference(READS_JUDGE)
    held = await append(streams, 20)
    async with consuming_with(judge, streams, board, settings) as counted:
        await until(lambda: judge.running == 6, "the judge to be full")
        before = looks
        await until(lambda: looks > before, "the consumer to go on for a while")
        await board.put_preference(READS_STYLE)
        pairs = await scored(streams, 20 - 6 - settings.batch)  # all but those that may wait, and a batch
        assert {outcome.scored_under for _, outcome in pairs if isinstance(outcome, Scored)} == {2}
        judge.release.set()
        pairs += await scored(streams, 20 - len(pairs))
    assert sorted(outcomes_of(pairs)) == sorted(held)
    assert judge.most == 6
    assert max(counted.values()) == 1


async def test_slow_judgements_leave_the_places_of_the_others_free() -> None:
    settings = SETTINGS.model_copy(update={"claim_idle_s": 60.0, "batch": 1})
    streams, board, judge = MemoryStreams(), MemoryBoard(), HeldJudge(concurrency=8)
    await board.put_preference(READS_JUDGE)
    await append(streams, 8)
    async with consuming_with(judge, streams, board, settings) as counted:
        await until(lambda: judge.running == 8, "eight judgements at once, with a batch of one")
        assert len(counted) == 8
        judge.release.set()
        await scored(streams, 8)
