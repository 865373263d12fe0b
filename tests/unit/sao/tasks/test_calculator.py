from __future__ import annotations

import math
import random
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.tasks.base import Prompt, UnscorableError
from sao.tasks.calculator import ERROR, MAX_CALLS, Calculator, calculate, written
from sao.tasks.prompt_files import load_prompts
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from tests.support.rollouts import play, recorded

TASK = Calculator()
TOKENIZER = tokenizer_of_run(None, TASK)
PROMPT = Prompt("p", "64*27", {})
TOKEN_IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=24)


@settings(deadline=None)
@given(left=st.integers(-999_999, 999_999), operator=st.sampled_from("+-*"), right=st.integers(0, 999_999))
def test_the_calculator_tells_the_truth(left: int, operator: str, right: int) -> None:
    truth = {"+": left + right, "-": left - right, "*": left * right}[operator]
    assert calculate(f"{left}{operator}{right}") == truth


@settings(deadline=None)
@given(text=st.text(alphabet="0123456789+-*=?:E ", max_size=12))
def test_anything_else_is_no_calculation(text: str) -> None:
    head, *operators = text.lstrip("+-"), *(c for c in text[1:] if c in "+-*")
    value = calculate(text)
    if value is not None:
        assert len(operators) == 1
        assert head[0].isdigit()
        assert text[-1].isdigit()


@pytest.mark.parametrize(
    "text", ["", "64", "64*", "*27", "64**27", "1+2+3", "64 *27", "1234567+1", "٣+٤", "2/1", "1\n+2"]
)
def test_malformed_expressions_have_no_value(text: str) -> None:
    assert calculate(text) is None


@settings(deadline=None)
@given(value=st.integers(-100_000, 100_000))
def test_numbers_are_written_with_sign_and_four_digits(value: int) -> None:
    text = written(value)
    if abs(value) <= 9999:
        assert len(text) == 5
        assert int(text) == value
    else:
        assert text == ERROR


def test_an_episode_answers_a_call_and_scores_the_answer() -> None:
    trajectory = play(TASK, PROMPT, TOKENIZER, ["<call>64*27</call>", "<ans>+1728<eos>"])
    assert TOKENIZER.decode(trajectory.token_ids) == "<bos>64*27?<call>64*27</call><obs>+1728</obs><ans>+1728<eos>"
    assert TASK.score(trajectory, TOKENIZER) == {"correct": 1.0, "used_calculator": 1.0}


@pytest.mark.parametrize(
    ("actions", "correct", "used"),
    [
        (["<ans>+1728<eos>"], 1, 0),
        (["64*27=<ans>+1728<eos>"], 1, 0),
        (["<ans>+1728"], 0, 0),
        (["<ans>+1728?<eos>"], 0, 0),
        (["<ans>1728<eos>"], 0, 0),
        (["+1728<eos>"], 0, 0),
        (["<ans>+1729<ans>+1728<eos>"], 0, 0),
        (["<call>64*28</call>", "<ans>+1728<eos>"], 1, 1),
        (["<call>64*</call>", "<ans>+1728<eos>"], 1, 0),
        (["<ans>+1728<call>64*27</call>", "<eos>"], 0, 1),
        (["64*27</call>", "<ans>+1728<eos>"], 1, 0),
        (["<call>64*27</call>"], 0, 1),
    ],
)
def test_only_the_right_answer_in_the_right_place_is_correct(actions: list[str], correct: int, used: int) -> None:
    trajectory = play(TASK, PROMPT, TOKENIZER, actions)
    assert TASK.score(trajectory, TOKENIZER) == {"correct": correct, "used_calculator": used}


@settings(deadline=None)
@given(action=TOKEN_IDS)
def test_any_action_gets_an_observation(action: list[int]) -> None:
    episode = TASK.episode(PROMPT, TOKENIZER)
    observation = episode.observe(action)
    assert observation.done == (action[-1] != TOKENIZER.token_id("</call>"))
    assert bool(observation.token_ids) != observation.done


@settings(deadline=None)
@given(turns=st.lists(st.tuples(TOKEN_IDS, st.just([]) | TOKEN_IDS), min_size=1, max_size=5))
def test_scores_are_zero_or_one_for_any_tokens(turns: list[tuple[list[int], list[int]]]) -> None:
    components = TASK.score(recorded([1], turns, {"truth": "+1728"}), TOKENIZER)
    assert components.keys() == TASK.components
    assert set(components.values()) <= {0.0, 1.0}
    assert math.isfinite(TASK.default_preference.value(components))


def test_endless_calling_ends() -> None:
    episode = TASK.episode(PROMPT, TOKENIZER)
    call = TOKENIZER.encode("<call>1+1</call>")
    assert [episode.observe(call).done for _ in range(MAX_CALLS + 1)] == [False] * MAX_CALLS + [True]


@pytest.mark.parametrize("payload", [{}, {"truth": 1728}])
def test_a_trajectory_without_the_truth_is_unscorable(payload: dict[str, object]) -> None:
    with pytest.raises(UnscorableError, match="truth"):
        TASK.score(recorded([1], [([2], [])], payload), TOKENIZER)


@pytest.mark.parametrize("text", ["sixty", "9999*9999"])
def test_a_prompt_that_cannot_be_answered_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="'p'"):
        TASK.episode(Prompt("p", text, {}), TOKENIZER)


def test_every_prompt_of_ours_can_be_asked_and_answered() -> None:
    for path in (TASK.prompts_path, TASK.heldout_prompts_path):
        for prompt in load_prompts(path):
            truth = eval(prompt.text)
            trajectory = play(TASK, prompt, TOKENIZER, [f"<ans>{truth:+05d}<eos>"])
            assert TASK.score(trajectory, TOKENIZER)["correct"] == 1.0


def test_the_warm_start_mix_is_as_documented() -> None:
    kinds: Counter[str] = Counter()
    for demonstration in islice(TASK.demonstrations(random.Random(0)), 4000):
        prompt, *rest = (text for text, _ in demonstration.pieces)
        asked = prompt.removeprefix("<bos>").removesuffix("?")
        right = rest[-1] == f"<ans>{written(calculate(asked))}<eos>"
        if len(rest) == 1:
            kinds["guess"] += 1
        elif rest[0] != f"<call>{asked}</call>":
            kinds["wrong call"] += 1
        else:
            kinds["right" if right else "wrong answer"] += 1
        assert [learn for _, learn in demonstration.pieces] == [False, True, False, True][: len(rest) + 1]
    shares = {kind: count / 4000 for kind, count in kinds.items()}
    assert shares == pytest.approx({"right": 0.18, "guess": 0.38, "wrong call": 0.22, "wrong answer": 0.22}, abs=0.03)
