from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.board.memory import MemoryBoard
from sao.config.schema import AlarmsSection
from sao.outcome import InfraFailed, Invalid, RewardOutcome, Scored, TimedOut
from sao.preference import PreferenceDocument
from sao.tasks.base import Task, UnscorableError
from sao.tasks.calculator import Calculator
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from sao.v1 import trajectory_pb2 as pb
from services.reward import metrics
from services.reward.alarm_watch import AlarmWatch
from services.reward.alarms import Alarms
from services.reward.scorer import TrajectoryScorer, Unfinished
from services.reward.scorers.base import ScorerFailedError, ScoringRequest
from services.reward.scorers.memory import MemoryScorer
from tests.support.scored_tasks import SETTINGS, SteeredTask, TwoScorersTask, always, trajectory, until

TOKENIZER = tokenizer_of_run(None, Calculator())


async def outcome_of(
    task: Task,
    payload: bytes | None = None,
    *,
    preference: PreferenceDocument | None = None,
    timeout_s: float = 5.0,
) -> RewardOutcome:
    board = MemoryBoard()
    await board.put_preference(preference or task.default_preference)
    settings = SETTINGS.model_copy(update={"component_timeout_s": timeout_s})
    scorer = TrajectoryScorer(task, TOKENIZER, board.preference, settings, wall_clock=lambda: 12.5)
    outcome = await scorer.score(trajectory().message.SerializeToString() if payload is None else payload)
    assert not isinstance(outcome, Unfinished)
    return outcome


def raising(error: Exception) -> SteeredTask:
    def score(_: Trajectory) -> Mapping[str, float]:
        raise error

    return SteeredTask(score)


async def test_components_become_a_reward_under_the_preference() -> None:
    preference = PreferenceDocument(name="p", weights={"correct": 0.25}, offset=0.5, gates=["style"])
    outcome = await outcome_of(always(correct=1.0, style=0.5), preference=preference)
    assert outcome == Scored(
        components={"correct": 1.0, "style": 0.5}, value=0.375, scored_under=1, scoring_started_s=12.5
    )


@settings(deadline=None)
@given(correct=st.floats(0, 1), style=st.floats(0, 1), weight=st.floats(-2, 2), offset=st.floats(-1, 1))
async def test_stored_components_give_the_stored_value_again(
    correct: float, style: float, weight: float, offset: float
) -> None:
    preference = PreferenceDocument(name="p", weights={"correct": weight, "style": 1.0}, offset=offset)
    outcome = await outcome_of(always(correct, style), preference=preference)
    assert isinstance(outcome, Scored)
    assert preference.value(outcome.components) == outcome.value
    assert preference.low <= outcome.value <= preference.high


async def test_a_scorer_that_hangs_is_a_timeout_and_not_a_zero() -> None:
    release = threading.Event()

    def hang(_: Trajectory) -> Mapping[str, float]:
        release.wait(20)
        return {}

    outcome = await outcome_of(SteeredTask(hang), timeout_s=0.01)
    release.set()
    assert outcome == TimedOut(component="score", after_s=0.01)


@pytest.mark.parametrize("error", [RuntimeError("judge is down"), TimeoutError("judge is down")])
async def test_a_scorer_that_raises_is_an_infrastructure_failure(error: Exception) -> None:
    outcome = await outcome_of(raising(error))
    assert isinstance(outcome, InfraFailed)
    assert outcome.reason == f"{type(error).__name__}: judge is down"


async def test_an_unscorable_trajectory_is_invalid() -> None:
    outcome = await outcome_of(raising(UnscorableError("no truth")))
    assert outcome == Invalid(reason="score: no truth")


@pytest.mark.parametrize(
    ("components", "component", "reason"),
    [
        ({"correct": 1.0}, "score", "gave ['correct'], declares ['correct', 'style']"),
        ({"correct": 1.0, "style": 0.0, "more": 0.0}, "score", "'more'"),
        ({"correct": math.nan, "style": 0.0}, "correct", "correct is nan"),
        ({"correct": 1.0, "style": math.inf}, "style", "style is inf"),
        ({"correct": "high", "style": 0.0}, "correct", "correct is 'high', expected a number"),
        ({"correct": "0.5", "style": 0.0}, "correct", "correct is '0.5', expected a finite number"),
        ({"correct": True, "style": 0.0}, "correct", "correct is True, expected a number"),
        ({"correct": None, "style": 0.0}, "correct", "correct is None, expected a number"),
        ({"correct": 10**5000, "style": 0.0}, "correct", "correct is int that cannot be written"),
        ({"correct": 10**400, "style": 0.0}, "correct", "expected a number"),
        ({"correct": torch.zeros(2), "style": 0.0}, "correct", "expected a number"),
        ({"correct": 1.0, 2: 0.0}, "score", "gave ['2', 'correct'], declares ['correct', 'style']"),
        (None, "score", "gave NoneType, expected a mapping"),
        (0.5, "score", "gave float, expected a mapping"),
    ],
)
async def test_components_that_are_not_what_the_task_declares_never_become_a_reward(
    components: Any, component: str, reason: str
) -> None:
    outcome = await outcome_of(SteeredTask(lambda _: components))
    assert isinstance(outcome, InfraFailed)
    assert outcome.component == component
    assert reason in outcome.reason


async def test_a_preference_the_components_cannot_serve_is_an_infrastructure_failure() -> None:
    outcome = await outcome_of(always(), preference=PreferenceDocument(name="p", weights={"foreign": 1.0}))
    assert isinstance(outcome, InfraFailed)
    assert outcome.component == "preference"
    assert "foreign" in outcome.reason


@pytest.mark.parametrize("reason", [pb.FINISH_REASON_ABORTED, pb.FINISH_REASON_ENV_ERROR])
async def test_a_rollout_that_broke_off_is_invalid(reason: pb.FinishReason.ValueType) -> None:
    outcome = await outcome_of(always(), trajectory(reason).message.SerializeToString())
    assert isinstance(outcome, Invalid)


@pytest.mark.parametrize("reason", [pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_TURN_LIMIT])
async def test_a_rollout_cut_at_a_limit_is_scored(reason: pb.FinishReason.ValueType) -> None:
    assert isinstance(await outcome_of(always(), trajectory(reason).message.SerializeToString()), Scored)


async def test_damaged_bytes_are_invalid() -> None:
    outcome = await outcome_of(always(), b"\xff\xff\xff")
    assert isinstance(outcome, Invalid)
    assert "no sao.v1.Trajectory" in outcome.reason


async def test_without_a_preference_nothing_is_scored() -> None:
    outcome = await TrajectoryScorer(always(), TOKENIZER, MemoryBoard().preference, SETTINGS).score(b"")
    assert isinstance(outcome, InfraFailed)


def gives(**components: float) -> Any:
    return lambda _trajectory, _tokenizer: components


def broken(_trajectory: Trajectory, _tokenizer: Tokenizer) -> Mapping[str, float]:
    msg = "down"
    raise RuntimeError(msg)


def unscorable(_trajectory: Trajectory, _tokenizer: Tokenizer) -> Mapping[str, float]:
    msg = "no truth"
    raise UnscorableError(msg)


async def test_separate_scorers_are_put_together() -> None:
    outcome = await outcome_of(TwoScorersTask(gives(correct=1.0), gives(style=0.25)))
    assert isinstance(outcome, Scored)
    assert outcome.components == {"correct": 1.0, "style": 0.25}


async def test_a_failing_scorer_is_named_and_invalid_outranks_what_a_retry_could_cure() -> None:
    failed = await outcome_of(TwoScorersTask(gives(correct=1.0), broken))
    assert failed == InfraFailed(component="style", reason="RuntimeError: down")
    invalid = await outcome_of(TwoScorersTask(broken, unscorable))
    assert invalid == Invalid(reason="style: no truth")


async def test_the_preference_is_read_after_the_start_is_noted() -> None:
    board, order = MemoryBoard(), []
    await board.put_preference(always().default_preference)

    async def read() -> Any:
        order.append("read")
        return await board.preference()

    def clock() -> float:
        order.append("start")
        return 0.0

    await TrajectoryScorer(always(), TOKENIZER, read, SETTINGS, wall_clock=clock).score(b"")
    assert order == ["start", "read"]


RUBRIC = PreferenceDocument(name="judged", weights={"humour": 0.5, "style": 1.0}, rubric="Puns are not funny.")


class Critic:
    """A judge of the run file, and how often it was asked."""

    def __init__(self, answer: Callable[[], Awaitable[Mapping[str, float]]], *components: str) -> None:
        self.asked = 0
        self._answer = answer
        names = dict.fromkeys(components or ("humour",), "text")
        self.scorer = MemoryScorer("critic", names, self._ask, deadline_s=0.05, judges=True)

    async def _ask(self, _: ScoringRequest) -> Mapping[str, float]:
        self.asked += 1
        return await self._answer()


async def funny() -> Mapping[str, float]:
    return {"humour": 0.5}


async def never() -> Mapping[str, float]:
    held: asyncio.Future[Mapping[str, float]] = asyncio.get_running_loop().create_future()
    return await held


async def down() -> Mapping[str, float]:
    msg = "the endpoint answers 500"
    raise ScorerFailedError(msg)


async def hopeless() -> Mapping[str, float]:
    msg = "no text"
    raise UnscorableError(msg)


async def judged_outcome(critic: Critic, task: Task, preference: PreferenceDocument = RUBRIC) -> RewardOutcome:
    board = MemoryBoard()
    await board.put_preference(preference)
    scorer = TrajectoryScorer(task, TOKENIZER, board.preference, SETTINGS, scorers=[critic.scorer])
    outcome = await scorer.score(trajectory().message.SerializeToString())
    assert not isinstance(outcome, Unfinished)
    return outcome


async def test_what_a_judge_gave_is_kept_with_its_rubric() -> None:
    outcome = await judged_outcome(Critic(funny), always(style=0.25))
    assert isinstance(outcome, Scored)
    assert outcome.components == {"correct": 1.0, "style": 0.25, "humour": 0.5}
    assert outcome.value == 0.5
    assert outcome.judged == {"humour": RUBRIC.rubric_id}


async def test_a_scorer_that_the_preference_does_not_read_is_not_asked() -> None:
    critic = Critic(never)
    outcome = await judged_outcome(critic, always(), PreferenceDocument(name="p", weights={"style": 1.0}))
    assert isinstance(outcome, Scored)
    assert critic.asked == 0
    assert outcome.components == {"correct": 1.0, "style": 0.5}
    assert outcome.judged == {}


@pytest.mark.parametrize(
    "reads",
    [
        PreferenceDocument(name="p", weights={"style": 1.0}, gates=["humour"]),
        PreferenceDocument(name="p", weights={"style": 1.0}, thresholds={"humour": 0.1}),
    ],
    ids=["gate", "threshold"],
)
async def test_gates_and_thresholds_read_it_too(reads: PreferenceDocument) -> None:
    critic = Critic(funny)
    assert isinstance(await judged_outcome(critic, always(), reads), Scored)
    assert critic.asked == 1


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (never, TimedOut(component="critic", after_s=0.05)),
        (down, InfraFailed(component="critic", reason="the endpoint answers 500")),
        (hopeless, Invalid(reason="critic: no text")),
    ],
)
async def test_a_judge_that_fails_is_a_typed_failure_with_its_name(
    answer: Callable[[], Awaitable[Mapping[str, float]]], outcome: RewardOutcome
) -> None:
    counter = metrics.COMPONENT_OUTCOMES.labels("critic", outcome.kind)
    before = counter._value.get()
    assert await judged_outcome(Critic(answer), always()) == outcome
    assert counter._value.get() == before + 1


async def test_the_tasks_own_failure_waits_for_no_judge() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless() -> Mapping[str, float]:
        begun.set()
        try:
            return await never()
        finally:
            ended.set()

    critic = Critic(endless)
    critic.scorer.deadline_s = 60.0
    outcome = await asyncio.wait_for(judged_outcome(critic, raising(UnscorableError("no truth"))), 5)
    assert outcome == Invalid(reason="score: no truth")
    assert begun.is_set()
    await asyncio.wait_for(ended.wait(), 5)  # nobody pays a judge for what is dead already


async def test_waiting_is_said_once_the_tasks_components_are_there() -> None:
    board, said = MemoryBoard(), []
    await board.put_preference(RUBRIC)
    held = asyncio.Event()

    async def hold() -> Mapping[str, float]:
        await held.wait()
        return {"humour": 1.0}

    critic = Critic(hold)
    critic.scorer.deadline_s = 5.0
    scorer = TrajectoryScorer(always(), TOKENIZER, board.preference, SETTINGS, scorers=[critic.scorer])
    payload = trajectory().message.SerializeToString()
    scoring = asyncio.ensure_future(scorer.score(payload, on_waiting=lambda: said.append(True)))
    await until(lambda: bool(said), "the task's components")
    held.set()
    assert isinstance(await scoring, Scored)
    assert said == [True]
    await board.put_preference(PreferenceDocument(name="p", weights={"style": 1.0}))
    await scorer.score(payload, on_waiting=lambda: said.append(False))
    assert said == [True]


async def test_what_is_scored_is_watched_for_hacking() -> None:
    board = MemoryBoard()
    await board.put_preference(always().default_preference)
    watch = AlarmWatch(Alarms(AlarmsSection(window=50)))
    level = {"correct": 0.1, "style": 0.9}
    scorer = TrajectoryScorer(SteeredTask(lambda _: level), TOKENIZER, board.preference, SETTINGS, alarms=watch)
    payload = trajectory().message.SerializeToString()
    for _ in range(200):
        await scorer.score(payload)
    level.update(correct=0.9, style=0.1)
    for _ in range(50):
        await scorer.score(payload)
    assert [(alarm.rising, alarm.collapsing) for alarm in watch.active()] == [("correct", "style")]
