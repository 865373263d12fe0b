"""How an episode ends: each limit has its finish reason, and nothing ends it in silence."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import pytest

from sao.board.memory import MemoryBoard
from sao.invariants import routing_violations, violations
from sao.routing import NO_RECORD, RoutingShape
from sao.tasks.base import Episode, Observation, Prompt
from sao.tokenizer import Tokenizer
from sao.v1 import ingest_pb2
from sao.v1 import trajectory_pb2 as pb
from services.rollout.engines.memory import MemoryEngine
from services.rollout.episode import EpisodeLimits, EpisodeRunner, UnplayableError
from services.rollout.rotation import Rotation
from tests.support.ingest import VOCAB
from tests.support.rollout_worker import LIMITS, STOP, CountTask, make_runner, write_engine
from tests.support.trajectories import LIMITS as ACCEPTED
from tests.support.trajectories import ROUTING, VERSIONS

ACT, OBS = pb.SEGMENT_KIND_ACTION, pb.SEGMENT_KIND_OBSERVATION


def stops_after(count: int) -> MemoryEngine:
    """Turns of exactly `count` tokens, the last a stop token."""
    sampled = 0

    def policy(_: Sequence[int]) -> Mapping[int, float]:
        nonlocal sampled
        sampled += 1
        return {STOP: 1.0} if sampled % count == 0 else {5: 1.0}

    return MemoryEngine("engine-0", VOCAB, policy=policy, version=VERSIONS[0])


class ScriptedTask(CountTask):
    """An episode whose prompt and observations a test writes down."""

    def __init__(self, prompt: Sequence[int], *observations: Observation | Exception) -> None:
        self._prompt = list(prompt)
        self._observations = list(observations)

    def episode(self, prompt: Prompt, tokenizer: Tokenizer) -> Episode:
        task = self

        class Scripted:
            prompt_token_ids = task._prompt
            stop_token_ids = (STOP,)
            task_payload: Mapping[str, object] = {}

            def observe(self, action_token_ids: Sequence[int]) -> Observation:
                found = task._observations.pop(0)
                if isinstance(found, Exception):
                    raise found
                return found

        return Scripted()  # type: ignore[return-value]


async def runner(
    engine: MemoryEngine,
    task: CountTask | None = None,
    limits: EpisodeLimits = LIMITS,
    routing: RoutingShape | None = None,
    *,
    salted: bool = False,
) -> EpisodeRunner:
    board = MemoryBoard()
    await write_engine(board, "engine-0", verified=VERSIONS)
    rotation = Rotation(board, {"engine-0": engine})
    await rotation.refresh()
    return make_runner(rotation, task=task, limits=limits, routing=routing, salted=salted)


async def play(
    engine: MemoryEngine, task: CountTask | None = None, limits: EpisodeLimits = LIMITS, *, ordinal: int = 0
) -> pb.Trajectory:
    lease = ingest_pb2.PromptLease(lease_id="7-3", ordinal=ordinal, attempt=3)
    request = await (await runner(engine, task, limits)).play(lease, attempt=3)
    assert violations(request.trajectory, ACCEPTED, VERSIONS) == []
    assert request.routed_experts == b""
    return request.trajectory


async def test_an_episode_of_several_turns_brings_the_routes_of_all_of_it() -> None:
    engine = stops_after(3)
    engine._routing = ROUTING
    task = ScriptedTask([1] * 4, Observation([3, 4], done=False), Observation([6] * 5, done=True))
    lease = ingest_pb2.PromptLease(lease_id="7-3", attempt=1)
    request = await (await runner(engine, task, routing=ROUTING)).play(lease, attempt=1)

    message = request.trajectory
    assert shape(message) == [(ACT, 3), (OBS, 2), (ACT, 3), (OBS, 5)]
    assert routing_violations(message, request.routed_experts, replace(ACCEPTED, routing=ROUTING)) == []
    tokens = list(itertools.chain(message.prompt_token_ids, *(segment.token_ids for segment in message.segments)))
    seen = 4 + 3 + 2 + 3 - 1  # the last action token and the observation after it were never read
    assert request.routed_experts[: seen * ROUTING.row_bytes] == engine._routes(tokens[:seen], ROUTING)
    assert set(request.routed_experts[seen * ROUTING.row_bytes :]) == {NO_RECORD}


async def test_routes_that_weights_of_a_version_before_chose_are_not_on_record() -> None:
    sampled = 0

    def policy(_: Sequence[int]) -> Mapping[int, float]:
        nonlocal sampled
        sampled += 1
        if sampled == 3:
            engine.version = VERSIONS[1]
        return {STOP: 1.0} if sampled == 5 else {5: 1.0}

    engine = MemoryEngine("engine-0", VOCAB, policy=policy, version=VERSIONS[0], routing=ROUTING)
    lease = ingest_pb2.PromptLease(lease_id="7-3", attempt=1)
    task = ScriptedTask([1] * 4, Observation([], done=True))
    request = await (await runner(engine, task, routing=ROUTING)).play(lease, attempt=1)

    (action,) = request.trajectory.segments
    assert [(span.version, span.start, span.end) for span in action.versions] == [
        (VERSIONS[0], 0, 2),
        (VERSIONS[1], 2, 5),
    ]
    rows = [request.routed_experts[i : i + ROUTING.row_bytes] for i in range(0, len(request.routed_experts), 4)]
    lost = [row == bytes([NO_RECORD] * ROUTING.row_bytes) for row in rows]
    assert lost == [False] * 3 + [True] * 2 + [False] * 3


def shape(message: pb.Trajectory) -> list[tuple[int, int]]:
    return [(segment.kind, len(segment.token_ids)) for segment in message.segments]


async def test_an_environment_that_is_done_stops_the_episode() -> None:
    message = await play(stops_after(3), ordinal=2)
    assert message.finish_reason == pb.FINISH_REASON_STOP
    assert shape(message) == [(ACT, 3), (OBS, 2), (ACT, 3), (OBS, 2), (ACT, 3)]
    assert (message.ordinal, message.attempt, message.lease_id, message.engine_id) == (2, 3, "7-3", "engine-0")
    assert len(message.turns) == 3
    assert message.traceparent.startswith(f"00-{message.id.replace('-', '')}-")


async def test_a_turn_without_a_stop_token_is_cut_at_its_length() -> None:
    message = await play(stops_after(100))
    assert message.finish_reason == pb.FINISH_REASON_LENGTH
    assert shape(message) == [(ACT, LIMITS.max_new_tokens)]


async def test_the_last_turn_gets_only_the_room_that_is_left() -> None:
    task = ScriptedTask([1] * 4, Observation([3, 4], done=False))
    limits = EpisodeLimits(max_turns=4, max_new_tokens=8, max_tokens=12, turn_timeout_s=10)
    engine = stops_after(100)
    engine._policy = lambda ids: {STOP: 1.0} if len(ids) == 6 else {5: 1.0}
    message = await play(engine, task, limits)
    assert shape(message) == [(ACT, 3), (OBS, 2), (ACT, 3)]
    assert message.finish_reason == pb.FINISH_REASON_LENGTH


async def test_an_observation_that_leaves_no_room_for_an_action_ends_the_episode_before_it() -> None:
    task = ScriptedTask([1] * 4, Observation([3] * 6, done=False))
    limits = EpisodeLimits(max_turns=4, max_new_tokens=8, max_tokens=12, turn_timeout_s=10)
    message = await play(stops_after(2), task, limits)
    assert shape(message) == [(ACT, 2)]
    assert message.finish_reason == pb.FINISH_REASON_LENGTH


async def test_a_last_observation_is_kept_where_it_fits() -> None:
    task = ScriptedTask([1] * 4, Observation([3] * 6, done=True))
    limits = EpisodeLimits(max_turns=4, max_new_tokens=8, max_tokens=12, turn_timeout_s=10)
    message = await play(stops_after(2), task, limits)
    assert shape(message) == [(ACT, 2), (OBS, 6)]
    assert message.finish_reason == pb.FINISH_REASON_STOP


async def test_an_environment_that_never_ends_meets_the_turn_limit() -> None:
    task = ScriptedTask([1], *[Observation([3], done=False)] * 2)
    limits = EpisodeLimits(max_turns=2, max_new_tokens=8, max_tokens=96, turn_timeout_s=10)
    message = await play(stops_after(1), task, limits)
    assert shape(message) == [(ACT, 1), (OBS, 1), (ACT, 1), (OBS, 1)]
    assert message.finish_reason == pb.FINISH_REASON_TURN_LIMIT


@pytest.mark.parametrize("broken", [RuntimeError("sandbox is gone"), Observation([], done=False)])
async def test_a_broken_environment_is_recorded_as_such(broken: Observation | Exception) -> None:
    message = await play(stops_after(2), ScriptedTask([1], broken))
    assert message.finish_reason == pb.FINISH_REASON_ENV_ERROR
    assert shape(message) == [(ACT, 2)]


@pytest.mark.parametrize("prompt", [[], [1] * LIMITS.max_tokens])
async def test_a_prompt_with_no_room_for_an_action_can_not_be_played(prompt: list[int]) -> None:
    lease = ingest_pb2.PromptLease(lease_id="0-1", attempt=1)
    with pytest.raises(UnplayableError, match=f"{len(prompt)} tokens, expected 1 to"):
        await (await runner(stops_after(1), ScriptedTask(prompt))).play(lease, attempt=1)


async def test_a_task_that_gives_no_episode_is_named_with_its_prompt() -> None:
    class Broken(CountTask):
        def episode(self, prompt: Prompt, tokenizer: Tokenizer) -> Episode:
            return cast("Episode", prompt.data["expected_answer"])

    lease = ingest_pb2.PromptLease(lease_id="5-1", ordinal=5, attempt=1)
    with pytest.raises(UnplayableError, match=r"prompt p5: task count gives no episode: KeyError"):
        await (await runner(stops_after(1), Broken())).play(lease, attempt=1)


def test_a_hanging_environment_keeps_no_worker_from_ending() -> None:
    """Asyncio's own pool is waited for when its loop closes; this one returns at once."""
    release = threading.Event()

    class Hanging(ScriptedTask):
        def episode(self, prompt: Prompt, tokenizer: Tokenizer) -> Episode:
            class Stuck:
                prompt_token_ids = (1,)
                stop_token_ids = (STOP,)
                task_payload: Mapping[str, object] = {}

                def observe(self, action_token_ids: Sequence[int]) -> Observation:
                    release.wait(30)
                    return Observation([], done=True)

            return Stuck()  # type: ignore[return-value]

    limits = EpisodeLimits(max_turns=4, max_new_tokens=8, max_tokens=96, turn_timeout_s=0.05)
    started = time.monotonic()
    try:
        message = asyncio.run(play(stops_after(2), Hanging([1]), limits))
        took_s = time.monotonic() - started
    finally:
        release.set()
    assert message.finish_reason == pb.FINISH_REASON_ENV_ERROR
    assert took_s < 10


@pytest.mark.parametrize(("salted", "salt"), [(True, VERSIONS[0]), (False, "")])
async def test_turns_carry_the_version_served_as_their_salt_where_loads_do_not_flush(salted: bool, salt: str) -> None:
    engine = stops_after(3)
    task = ScriptedTask([1] * 4, Observation([3, 4], done=False), Observation([], done=True))
    lease = ingest_pb2.PromptLease(lease_id="7-3", attempt=1)
    await (await runner(engine, task, salted=salted)).play(lease, attempt=1)
    assert engine.salts == [salt, salt]


async def test_every_request_has_an_id_of_its_own_and_of_fixed_length() -> None:
    engine = stops_after(3)
    lease = ingest_pb2.PromptLease(lease_id="7-3", attempt=1)
    for attempt in (1, 2):
        task = ScriptedTask([1] * 4, Observation([3, 4], done=False), Observation([], done=True))
        await (await runner(engine, task)).play(lease, attempt=attempt)
    assert len(set(engine.rids)) == len(engine.rids) == 4, "an attempt that is repeated is another request"
    assert all(re.fullmatch(r"[0-9a-f]{32}", rid) for rid in engine.rids), "an abort matches by prefix"
