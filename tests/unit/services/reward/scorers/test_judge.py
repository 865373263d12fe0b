"""What a judge is asked, and which of its answers count."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bench.judge.server import Asked, LoopbackServer, Reply, completion
from services.reward.scorers.base import ScorerFailedError
from services.reward.scorers.judge import JudgeScorer
from tests.support.scorers import DOCUMENT, GOOD, judge_section, request


async def judged(answer: Any, *, low: float = 0.0, high: float = 1.0) -> tuple[Mapping[str, float], dict[str, Any]]:
    """(scores, what was asked) of a judge that answers so."""
    asked: list[Asked] = []

    async def handle(one: Asked) -> Reply:
        asked.append(one)
        return Reply(body=json.dumps(answer).encode())

    async with LoopbackServer(handle) as server:
        scorer = JudgeScorer("critic", judge_section(server.url, low=low, high=high))
        try:
            scores = await scorer.score(request())
        finally:
            await scorer.close()
    assert asked[0].path == "/v1/chat/completions"
    return scores, json.loads(asked[0].body)


async def test_rubric_range_and_components_are_in_the_instruction_and_the_text_is_data() -> None:
    _, body = await judged(completion({"humour": 7, "taste": 3.5}), high=10.0)
    system, user = body["messages"]
    assert (system["role"], user["role"]) == ("system", "user")
    assert "Puns are not funny." in system["content"]
    assert "- humour: How funny it is" in system["content"]
    assert "from 0 to 10" in system["content"]
    shown = json.loads(user["content"])
    assert shown["prompt"] == "<bos> moon <go>"
    assert shown["turns"] == [{"role": "action", "text": "nyan sparkle <eos>"}]
    assert body["model"] == "tiny"
    assert body["temperature"] == 0
    schema = body["response_format"]["json_schema"]
    assert body["response_format"]["type"] == "json_schema"
    assert schema["strict"] is True
    assert schema["schema"]["required"] == ["humour", "taste"]
    assert schema["schema"]["additionalProperties"] is False
    assert schema["schema"]["properties"]["humour"] == {"type": "number", "minimum": 0.0, "maximum": 10.0}


async def test_without_a_rubric_the_descriptions_are_all_there_is() -> None:
    asked: list[Asked] = []

    async def handle(one: Asked) -> Reply:
        asked.append(one)
        return Reply(body=json.dumps(completion(GOOD)).encode())

    async with LoopbackServer(handle) as server:
        scorer = JudgeScorer("critic", judge_section(server.url))
        await scorer.score(request(document=DOCUMENT.model_copy(update={"rubric": None})))
        await scorer.close()
    assert "Rubric" not in json.loads(asked[0].body)["messages"][0]["content"]


@pytest.mark.parametrize("score", [0.0, 0.25, 1.0, 1])
async def test_a_score_in_the_range_counts(score: float) -> None:
    scores, _ = await judged(completion({"humour": score, "taste": 0.5}))
    assert scores == {"humour": score, "taste": 0.5}


@pytest.mark.parametrize("score", [-0.001, 1.001, 7, 1e300])
async def test_a_score_outside_the_range_is_a_failure_and_never_clipped(score: float) -> None:
    with pytest.raises(ScorerFailedError, match=r"judged humour as .*, the range is 0 to 1"):
        await judged(completion({"humour": score, "taste": 0.5}))


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        "good",
        {"choices": []},
        {"choices": [{}]},
        {"choices": [{"message": {"content": None}}]},
        {"choices": [{"message": {"content": "7 out of 10"}}]},
        {"choices": [{"message": {"content": "[0.5, 0.5]"}}]},
        {"choices": [{"message": {"content": '```json\n{"humour": 1, "taste": 1}\n```'}}]},
        {"choices": [{"message": {"content": json.dumps(GOOD)}, "finish_reason": "length"}]},
        {"choices": [{"message": {"content": json.dumps(GOOD), "refusal": "I will not"}}]},
        completion({"humour": 0.5}),
        completion({"humour": 0.5, "taste": 0.5, "reason": "because"}),
        completion({"humour": "0.5", "taste": 0.5}),
        completion({"humour": True, "taste": 0.5}),
    ],
    ids=str,
)
async def test_an_answer_that_is_not_the_object_asked_for_is_a_failure(answer: Any) -> None:
    with pytest.raises(ScorerFailedError):
        await judged(answer)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["humour", "taste", "x"]), inner),
    max_leaves=8,
)


@given(content=JSON)
async def test_whatever_a_judge_writes_is_scores_in_range_or_a_failure(content: Any) -> None:
    from services.reward.scorers.base import checked
    from services.reward.scorers.judge import _scores_of

    try:
        scores = checked(_scores_of(completion(content)), {"humour": "", "taste": ""})
    except ScorerFailedError:
        return
    assert scores.keys() == {"humour", "taste"}
    assert content == pytest.approx(scores)


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="low"):
        judge_section("http://x", low=1.0, high=1.0)


async def test_a_score_given_twice_is_a_failure_and_not_the_last_of_the_two() -> None:
    answer = completion({})
    answer["choices"][0]["message"]["content"] = '{"humour": 0.9, "taste": 0.5, "humour": 0.1}'
    with pytest.raises(ScorerFailedError, match="the judge wrote"):
        await judged(answer)
