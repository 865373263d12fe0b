"""What becomes of a trajectory that feedback is wanted for, over the desk, the consumer and the routes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from pydantic import ValidationError

import sao.board
import sao.streams
from sao.board.memory import MemoryBoard
from sao.config import ConfigError, RunConfig, load_run_config
from sao.config.schema import FeedbackSection
from sao.ids import uuid7
from sao.preference import PreferenceDocument
from sao.streams.base import DeadEvent, RequeueStatus, StreamName, StreamUnavailableError
from sao.streams.memory import MemoryStreams
from sao.streams.room import Feedback, Heard, Waiting
from sao.tasks.calculator import Calculator
from services.reward.app import main
from services.reward.catalogue import Catalogue
from services.reward.feedback.asking import asked
from services.reward.feedback.leftovers import Leftovers
from tests.support.reception import LIKED, PLAIN, Reception, post
from tests.support.scored_tasks import SteeredTask, always, append
from tests.support.waiting import eventually

SETTINGS = FeedbackSection(deadline_s=60.0, waiting_max=100)


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"sao_reward_feedback_{name}", labels) or 0.0


@pytest.fixture
async def reception(tmp_path: Path) -> Reception:
    """A run whose preference reads feedback."""
    board = MemoryBoard(claimed=True)
    await board.put_preference(LIKED)
    return Reception(MemoryStreams(board), board, SETTINGS, tmp_path)


async def test_what_the_preference_wants_feedback_for_waits_out_of_admission_and_is_joined(
    reception: Reception,
) -> None:
    first, second = await append(reception.streams, 2)
    await reception.consume()
    assert set(await reception.waiting()) == {first, second}
    assert await reception.streams.unconsumed() == 0
    assert await reception.scored() == {}

    reception.now_s += 30
    delays = counted("delay_seconds_sum")
    async with reception.client() as client:
        response = await post(client, first, 0.25, author="ada", reason="dull")
    assert (response.status_code, response.json()) == (200, {"trajectory": first, "value": 0.25, "state": "joined"})
    (outcome,) = (await reception.scored()).values()
    assert outcome.components == {"correct": 1.0, "style": 0.5, "feedback": 0.25}
    assert (outcome.value, outcome.scored_under, outcome.scoring_started_s) == (0.625, 1, reception.now_s)
    assert counted("delay_seconds_sum") - delays == 30
    assert await reception.waiting() == [second]


async def test_a_preference_that_does_not_read_it_parks_nothing(reception: Reception) -> None:
    await reception.board.put_preference(PLAIN)
    (one,) = await append(reception.streams, 1)
    await reception.consume()
    assert (await reception.scored())[one].components == {"correct": 1.0, "style": 0.5}
    assert await reception.waiting() == []


async def test_the_join_is_under_the_preference_that_is_current_then(reception: Reception) -> None:
    (one,) = await append(reception.streams, 1)
    await reception.consume()
    await reception.board.put_preference(PreferenceDocument(name="only", weights={"feedback": 0.5}))
    async with reception.client() as client:
        await post(client, one, 1.0)
    outcome = (await reception.scored())[one]
    assert (outcome.value, outcome.scored_under) == (0.5, 2)


async def test_the_time_is_noted_before_the_preference_is_read(reception: Reception) -> None:
    (one,) = await append(reception.streams, 1)
    await reception.consume()
    read = reception.board.preference

    async def slowly(version: int | None = None) -> Any:
        reception.now_s += 5
        return await read(version)

    reception.board.preference = slowly  # type: ignore[method-assign]
    before = reception.now_s
    async with reception.client() as client:
        await post(client, one, 1.0)
    assert (await reception.scored())[one].scoring_started_s == before


async def test_an_early_answer_is_kept_and_joined_as_soon_as_its_trajectory_waits(reception: Reception) -> None:
    (one,) = await append(reception.streams, 1)
    async with reception.client() as client:
        assert (await post(client, one, 1.0)).json()["state"] == "kept"
        assert (await post(client, one, 1.0)).json()["state"] == "kept"
        await reception.consume()
        assert await reception.waiting() == []
        assert (await reception.scored())[one].components["feedback"] == 1.0
        assert (await post(client, one, 1.0)).json()["state"] == "joined"


async def test_what_nobody_answers_is_a_dead_letter_of_kind_timeout_that_can_wait_anew(reception: Reception) -> None:
    (one,) = await append(reception.streams, 1)
    await reception.consume()
    reception.now_s += 59.9
    await reception.desk.sweep()
    assert await reception.waiting() == [one]
    assert counted("oldest_seconds") == pytest.approx(59.9)

    expired = counted("expired_total", why="deadline", disposal="dropped")
    reception.now_s += 0.1
    await reception.desk.sweep()

    assert await reception.buried() == {one: "timeout: feedback did not come within 60.0 s"}
    assert counted("expired_total", why="deadline", disposal="dropped") - expired == 1
    assert (await reception.streams.dead_totals()).counts[DeadEvent.BURIED] == {"timeout": 1}
    (letter,) = await reception.streams.dead_letters(count=1)
    assert letter.fields == {"task": "steered", "ordinal": "0"}
    assert await reception.streams.requeue_dead(letter) is RequeueStatus.REQUEUED
    await reception.consume()
    assert await reception.waiting() == [one]


async def test_beyond_the_bound_the_oldest_expire_at_once_by_name(reception: Reception) -> None:
    reception.settings = FeedbackSection(deadline_s=60.0, waiting_max=2)
    ids = []
    for ordinal in range(5):
        ids += await append(reception.streams, 1, first_ordinal=ordinal)
        await reception.consume()
        reception.now_s += 1
    await reception.desk.sweep()
    assert await reception.waiting() == ids[3:]
    buried = await reception.buried()
    assert set(buried) == set(ids[:3])
    assert buried[ids[0]] == (
        "timeout: feedback did not come within 5.0 s, and 2 younger ones wait (reward.feedback.waiting_max)"
    )


async def test_score_without_scores_only_under_a_preference_that_does_not_read_it(reception: Reception) -> None:
    reception.settings = FeedbackSection(deadline_s=60.0, on_expiry="score_without")
    dropped, *_ = await append(reception.streams, 1)
    await reception.consume()
    reception.now_s += 61
    await reception.desk.sweep()
    assert set(await reception.buried()) == {dropped}

    (scored,) = await append(reception.streams, 1, first_ordinal=1)
    await reception.consume()
    await reception.board.put_preference(PLAIN)
    reception.now_s += 61
    await reception.desk.sweep()
    outcome = (await reception.scored())[scored]
    assert (outcome.components, outcome.scored_under) == ({"correct": 1.0, "style": 0.5}, 2)
    assert set(await reception.buried()) == {dropped}


async def test_a_run_that_asks_no_more_leaves_nothing_waiting_for_ever(reception: Reception) -> None:
    ids = await append(reception.streams, 300)
    for _ in range(2):
        await reception.consume()
    await reception.streams.room.answer(ids[0], Feedback(value=0.25, at_ms=1), kept_max=1)
    assert len(await reception.waiting()) == 300

    await reception.board.put_preference(PLAIN)
    await asyncio.gather(*(Leftovers(reception.streams.room).send_back() for _ in range(3)))

    assert await reception.waiting() == []
    await reception.streams.open_consumer(StreamName.TRAJECTORIES, "another")
    back = await reception.streams.read(StreamName.TRAJECTORIES, "another", count=999, block_ms=0)
    assert sorted(one.trajectory_id for one in back) == sorted(ids), "each once"
    fields = {one.trajectory_id: dict(one.fields) for one in back}
    assert fields[ids[0]] == {"task": "steered", "ordinal": "0", "feedback": "0.25"}
    assert fields[ids[1]] == {"task": "steered", "ordinal": "1"}


async def test_a_run_that_asks_no_more_forgets_answers_that_came_to_nothing(reception: Reception) -> None:
    room = reception.streams.room
    ids = await append(reception.streams, 2)
    now_ms = time.time_ns() // 1_000_000
    for one, at_ms in zip(ids, (1, now_ms - 1000), strict=True):
        await room.answer(one, Feedback(value=0.25, at_ms=at_ms, author="what a person wrote"), kept_max=9)
    await Leftovers(room).forget()
    assert (await room.use()).kept == 1, "an older replica may park the other one yet"


async def test_a_service_without_feedback_clears_the_room_that_an_earlier_one_has_filled(
    run_config: RunConfig, tmp_path: Path
) -> None:
    streams, board = sao.streams.connect(run_config), sao.board.connect(run_config)
    await board.put_preference(LIKED)
    earlier = Reception(streams, board, SETTINGS, tmp_path)
    await append(streams, 3)
    await earlier.consume()
    await board.put_preference(PreferenceDocument(name="plain", weights={"correct": 1.0}))
    config = run_config.model_copy(update={"task": run_config.task.model_copy(update={"name": "calculator"})})
    stop = asyncio.Event()
    service = asyncio.ensure_future(main(config, stop))
    try:
        async with asyncio.timeout(20):
            while True:
                if (await streams.room.use()).waiting == 0:
                    break
                await asyncio.sleep(0.05)
    finally:
        stop.set()
        await service
        await streams.close()
        await board.close()


async def test_only_a_share_is_asked_for_and_the_rest_has_the_value_that_the_run_declares(
    reception: Reception,
) -> None:
    reception.settings = FeedbackSection(share=0.5, unasked=0.5)
    ids = await append(reception.streams, 40)
    await reception.consume()
    waiting, scored = set(await reception.waiting()), await reception.scored()
    assert waiting == {one for one in ids if asked(one, 0.5)}
    assert 5 < len(waiting) < 35
    assert set(scored) == set(ids) - waiting
    assert {outcome.components["feedback"] for outcome in scored.values()} == {0.5}
    async with reception.client() as client:
        response = await post(client, next(iter(scored)), 1.0)
        assert (response.status_code, response.json()["fate"]) == (410, "not_asked")
        stranger = next(one for one in (uuid7() for _ in range(1000)) if not asked(one, 0.5))
        assert (await post(client, stranger, 1.0)).status_code == 404


@given(st.uuids(version=4), st.floats(0, 1), st.floats(0, 1))
def test_whoever_is_in_a_share_is_in_every_larger_one(one: object, first: float, second: float) -> None:
    assert asked(str(one), 1.0)
    assert not asked(str(one), min(first, second)) or asked(str(one), max(first, second))


async def test_a_joined_value_travels_with_the_trajectory_that_is_sent_back_for_scoring(reception: Reception) -> None:
    (one,) = await append(reception.streams, 1)
    await reception.consume()
    async with reception.client() as client:
        await post(client, one, 0.1)
    await reception.streams.open_consumer(StreamName.SCORED, "trainer")
    (delivery,) = await reception.streams.read(StreamName.SCORED, "trainer", count=1, block_ms=0)
    fields = {name: value for name, value in delivery.fields.items() if name != "outcome"}
    await reception.streams.move(delivery, "trainer", StreamName.TRAJECTORIES, fields)
    await reception.consume()
    assert (await reception.scored())[one].components["feedback"] == 0.1


async def test_each_refusal_has_its_status_and_its_reason(reception: Reception) -> None:
    one, trained, expired = await append(reception.streams, 3)
    await reception.streams.mark_consumed([trained])
    await reception.streams.open_consumer(StreamName.TRAJECTORIES, "x")
    for delivery in await reception.streams.read(StreamName.TRAJECTORIES, "x", count=3, block_ms=0):
        if delivery.trajectory_id == expired:
            await reception.streams.room.park(delivery, "x", {"partial": "{}"}, now_ms=0)
    await reception.desk.sweep()
    async with reception.client() as client:
        unknown = await post(client, uuid7(), 1.0)
        assert (unknown.status_code, unknown.json()["fate"]) == (404, "unknown")
        assert (await post(client, one, 1.0)).status_code == 200
        other = await post(client, one, 0.5)
        assert (other.status_code, other.json()["fate"]) == (409, "conflict")
        gone = await post(client, expired, 1.0)
        assert (gone.status_code, gone.json()["fate"]) == (410, "expired")
        assert expired in gone.json()["detail"]
        gone = await post(client, trained, 1.0)
        assert (gone.status_code, gone.json()["fate"]) == (410, "consumed")


@pytest.mark.parametrize("value", ["1.01", "-0.001", "1e999", "NaN", '"1"', "true", "null", f"1{'0' * 400}"])
async def test_a_value_that_is_no_number_within_the_range_is_refused(reception: Reception, value: str) -> None:
    (one,) = await append(reception.streams, 1)
    async with reception.client() as client:
        response = await client.post("/v1/feedback", content=f'{{"trajectory": "{one}", "value": {value}}}')
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert (await reception.streams.room.use()).kept == 0


@pytest.mark.parametrize(
    "body", ["", "[]", '{"value": 1}', '{"trajectory": "x", "value": 1}', '{"trajectory": 1, "value": 1, "more": 2}']
)
async def test_a_body_that_is_no_feedback_is_refused(reception: Reception, body: str) -> None:
    async with reception.client() as client:
        assert (await client.post("/v1/feedback", content=body)).status_code == 422
        long = await client.post("/v1/feedback", content=b" " * 5000)
    assert long.status_code == 413


async def test_answers_beyond_the_bound_on_early_ones_are_to_be_repeated(reception: Reception) -> None:
    reception.settings = FeedbackSection(waiting_max=1)
    first, second = await append(reception.streams, 2)
    async with reception.client() as client:
        assert (await post(client, first, 1.0)).status_code == 200
        full = await post(client, second, 1.0)
    assert (full.status_code, full.headers["retry-after"]) == (503, "1")


async def test_early_answers_nobody_needed_are_let_go_and_counted(reception: Reception) -> None:
    await reception.board.put_preference(PLAIN)
    (one,) = await append(reception.streams, 1)
    async with reception.client() as client:
        await post(client, one, 1.0)
    await reception.consume()
    reception.now_s += 61
    unused = counted("unused_total")
    await reception.desk.sweep()
    assert counted("unused_total") - unused == 1
    assert (await reception.streams.room.use()).kept == 0


async def test_who_waits_is_listed_oldest_first_with_the_text_and_until_when(reception: Reception) -> None:
    first, second = await append(reception.streams, 2)
    await reception.consume()
    async with reception.client() as client:
        found = (await client.get("/v1/feedback", params={"limit": 1})).json()
        assert (await client.get("/v1/feedback", params={"limit": 0})).status_code == 422
    assert (found["component"], found["low"], found["high"], found["waiting"]) == ("feedback", 0.0, 1.0, 2)
    (shown,) = found["trajectories"]
    assert shown["trajectory"] in {first, second}
    assert (shown["since_s"], shown["until_s"]) == (reception.now_s, reception.now_s + 60.0)
    assert shown["text"]


async def test_a_store_that_does_not_answer_is_503_and_nothing_is_joined(reception: Reception) -> None:
    (one,) = await append(reception.streams, 1)
    await reception.consume()

    async def away(*_: object, **__: object) -> Heard:
        msg = "no answer within 5 s"
        raise StreamUnavailableError(msg)

    reception.streams.room.answer = away  # type: ignore[method-assign]
    async with reception.client() as client:
        response = await post(client, one, 1.0)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert await reception.waiting() == [one]


async def test_an_answer_that_was_taken_is_joined_by_a_sweep_when_its_desk_could_not(reception: Reception) -> None:
    (one,) = await append(reception.streams, 1)
    await reception.consume()
    find = reception.streams.room.find

    async def away(trajectory_id: str) -> tuple[Waiting, Feedback] | None:
        msg = f"{trajectory_id}: no answer within 5 s"
        raise StreamUnavailableError(msg)

    reception.streams.room.find = away  # type: ignore[method-assign]
    async with reception.client() as client:
        assert (await post(client, one, 1.0)).json()["state"] == "joined"
    assert await reception.waiting() == [one]
    reception.streams.room.find = find  # type: ignore[method-assign]
    reception.now_s += 61  # an answer that came in time is not overtaken by the deadline
    await reception.desk.sweep()
    assert list(await reception.scored()) == [one]
    assert await reception.buried() == {}


async def test_many_desks_join_and_expire_each_trajectory_once(reception: Reception) -> None:
    ids = await append(reception.streams, 30)
    await reception.consume()
    answers = [reception.desk.answer(one, 1.0, author="", reason="") for one in ids[:15] * 3]
    assert set(await asyncio.gather(*answers)) == {Heard.JOINED}
    reception.now_s += 61
    await asyncio.gather(*(reception.desk.sweep() for _ in range(4)))
    assert set(await reception.scored()) == set(ids[:15])
    assert set(await reception.buried()) == set(ids[15:])


async def test_a_join_that_gives_no_number_is_buried_with_the_reason(reception: Reception) -> None:
    reception.task = always(correct=2.0)
    (one,) = await append(reception.streams, 1)
    await reception.consume()
    beyond = PreferenceDocument(name="x", weights={"feedback": 1e308}, high=1e308, gates=["correct"])
    await reception.board.put_preference(beyond)
    async with reception.client() as client:
        await post(client, one, 1.0)
    reason = (await reception.buried())[one]
    assert reason.startswith("infra_failed: preference: x: ")
    assert await reception.waiting() == []


async def test_a_switch_to_what_was_not_computed_has_it_scored_again_with_its_feedback(reception: Reception) -> None:
    (one,) = await append(reception.streams, 1)
    await reception.consume()
    await reception.board.put_preference(PreferenceDocument(name="x", weights={"feedback": 1.0, "later": 1.0}))
    async with reception.client() as client:
        assert (await post(client, one, 0.25)).json()["state"] == "joined"
        assert await reception.waiting() == []
        assert await reception.buried() == {}
        await reception.board.put_preference(LIKED)
        await reception.consume()
        outcome = (await reception.scored())[one]
        assert (outcome.components["feedback"], outcome.scored_under) == (0.25, 3)
        assert (await post(client, one, 0.25)).json()["state"] == "joined"


async def test_what_expires_after_such_a_switch_is_scored_again_without(reception: Reception) -> None:
    reception.settings = reception.settings.model_copy(update={"on_expiry": "score_without"})
    (one,) = await append(reception.streams, 1)
    await reception.consume()
    await reception.board.put_preference(PreferenceDocument(name="x", weights={"later": 1.0}))
    reception.now_s += reception.settings.deadline_s + 1
    await reception.desk.sweep()
    assert await reception.waiting() == []
    await reception.board.put_preference(PLAIN)
    await reception.consume()
    assert (await reception.scored())[one].components.keys() == {"correct", "style"}


async def test_a_board_without_a_preference_makes_answers_wait(reception: Reception) -> None:
    (one,) = await append(reception.streams, 1)
    await reception.consume()
    board, reception.board = reception.board, MemoryBoard()
    async with reception.client() as client:
        await post(client, one, 1.0)
    assert await reception.waiting() == [one]
    reception.board = board
    await reception.desk.sweep()
    assert list(await reception.scored()) == [one]


async def test_the_loop_outlives_a_store_that_is_away(reception: Reception) -> None:
    calls = 0
    answered = reception.streams.room.answered

    async def sometimes(*, count: int) -> list[tuple[Waiting, Feedback]]:
        nonlocal calls
        calls += 1
        if calls == 1:
            msg = "no answer within 5 s"
            raise StreamUnavailableError(msg)
        return await answered(count=count)

    reception.streams.room.answered = sometimes  # type: ignore[method-assign]
    (one,) = await append(reception.streams, 1)
    await reception.consume()
    await reception.streams.room.answer(one, Feedback(value=1.0, at_ms=1), kept_max=1)
    running = asyncio.ensure_future(reception.desk.run())
    await eventually(lambda: _is_scored(reception, one), what="the join")
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert calls >= 2


async def _is_scored(reception: Reception, one: str) -> bool:
    return one in await reception.scored()


async def test_a_failed_component_never_waits(reception: Reception) -> None:
    def score(_: object) -> Mapping[str, float]:
        return {"correct": math.nan, "style": 0.0}

    reception.task, reception.claim_idle_s = SteeredTask(score), 0.05
    (one,) = await append(reception.streams, 1)
    await reception.consume()
    assert await reception.waiting() == []
    assert "correct is nan" in (await reception.buried())[one]


async def test_preferences_may_read_it_and_the_index_names_it(reception: Reception) -> None:
    async with reception.client() as client:
        assert "feedback" in (await client.get("/")).json()["components"]
        assert (await client.put("/v1/preferences", content=LIKED.model_dump_json())).status_code == 200


def test_a_name_that_the_task_uses_itself_is_refused() -> None:
    config = load_run_config(None, ["reward.feedback.component=correct"], env={})
    with pytest.raises(ConfigError, match=r"reward\.feedback\.component: 'correct' is computed already"):
        Catalogue(Calculator(), config.reward)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"low": 1.0, "high": 1.0}, "low"),
        ({"share": 0.5}, "unasked"),
        ({"unasked": 2.0}, "unasked"),
        ({"share": 0}, ""),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, float], key: str) -> None:
    with pytest.raises(ValidationError) as refused:
        FeedbackSection(**settings)  # type: ignore[arg-type]
    assert refused.value.errors()[0].get("ctx", {}).get("key", "") == key


async def test_texts_are_written_beside_the_event_loop(reception: Reception, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        def decode(self, token_ids: Any) -> str:
            begun.set()
            assert go_on.wait(5), "the event loop stood still meanwhile"
            return "a text"

    monkeypatch.setattr("tests.support.reception.TOKENIZER", Slow())
    await append(reception.streams, 1)
    await reception.consume()
    async with reception.client() as client:
        asking = asyncio.ensure_future(client.get("/v1/feedback"))
        await eventually(begun.is_set, what="the text to be written")
        go_on.set()
        assert [one["text"] for one in (await asking).json()["trajectories"]] == ["a text"]
