from __future__ import annotations

import random
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.tasks.base import Prompt
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from sao.tasks.writing import FEWEST_WORDS, LEXICONS, MOST_WORDS, NEUTRAL, TOPICS, Writing
from tests.support.rollouts import play, recorded

TASK = Writing()
TOKENIZER = tokenizer_of_run(None, TASK)
PROMPT = Prompt("p", "moon", {})
CUTE, CHUUNIBYOU = LEXICONS["cute"], LEXICONS["chuunibyou"]


def components_of(words: list[str] | tuple[str, ...], *, end: str = "<eos>") -> dict[str, float]:
    return dict(TASK.score(play(TASK, PROMPT, TOKENIZER, [" ".join([*words, end]).strip()]), TOKENIZER))


def value_of(style: str, words: list[str] | tuple[str, ...]) -> float:
    return TASK.preferences[style].value(components_of(words))


def test_words_belong_to_one_lexicon_only() -> None:
    words = [*TOPICS, *NEUTRAL, *(word for lexicon in LEXICONS.values() for word in lexicon)]
    assert len(set(words)) == len(words) == 8 + 24 + 3 * 16


def test_an_episode_is_one_text() -> None:
    episode = TASK.episode(PROMPT, TOKENIZER)
    assert TOKENIZER.decode(episode.prompt_token_ids) == "<bos> moon <go>"
    assert episode.stop_token_ids == [TOKENIZER.token_id("<eos>")]
    observation = episode.observe(TOKENIZER.encode("tiny kitten <eos>"))
    assert observation.done
    assert observation.token_ids == []


def test_an_unknown_topic_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'p'.*'tax'"):
        TASK.episode(Prompt("p", "tax", {}), TOKENIZER)


@settings(deadline=None)
@given(action=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=24))
def test_components_and_every_preference_stay_in_range_for_any_tokens(action: list[int]) -> None:
    components = TASK.score(recorded([1, 4, 3], [(action, [])], {}), TOKENIZER)
    assert components.keys() == TASK.components
    assert all(0 <= value <= 1 for value in components.values())
    assert sum(value for name, value in components.items() if name != "quality") <= 1 + 1e-12
    assert all(0 <= document.value(components) <= 1 for document in TASK.preferences.values())


@pytest.mark.parametrize(
    ("words", "end", "quality"),
    [
        (CUTE[: FEWEST_WORDS - 1], "<eos>", 0.0),
        (CUTE[:FEWEST_WORDS], "<eos>", 1.0),
        (CUTE[:MOST_WORDS], "<eos>", 1.0),
        (CUTE[: MOST_WORDS + 1], "<eos>", 0.0),
        (CUTE[:10], "", 0.0),
        (("tiny",) * 10, "<eos>", 1 - (0.9 - 0.3)),
        ((*CUTE[:9], "<bos>"), "<eos>", 0.9),
    ],
)
def test_quality_gates_length_and_takes_off_for_repetition_and_clutter(
    words: tuple[str, ...], end: str, quality: float
) -> None:
    assert components_of(words, end=end)["quality"] == pytest.approx(quality)


@pytest.mark.parametrize("style", sorted(LEXICONS))
def test_a_text_all_in_the_wanted_style_earns_one_and_all_in_another_nothing(style: str) -> None:
    assert value_of(style, LEXICONS[style][:10]) == 1.0
    for other in LEXICONS.keys() - {style}:
        assert value_of(style, LEXICONS[other][:10]) == pytest.approx(0.0)


def test_the_reward_is_graded_word_by_word_after_a_switch() -> None:
    mixed = [value_of("chuunibyou", (*CHUUNIBYOU[:i], *CUTE[i:10])) for i in range(11)]
    assert mixed == sorted(mixed)
    assert len(set(mixed)) == len(mixed)


def test_what_the_switch_finds_is_neither_all_right_nor_all_wrong() -> None:
    rewards = []
    for demonstration in islice(TASK.demonstrations(random.Random(0)), 400):
        text, learn = demonstration.pieces[1]
        assert learn
        rewards.append(value_of("cute", text.split()[:-1]))
    assert 0.3 < sum(rewards) / len(rewards) < 0.5
    assert len({round(reward, 3) for reward in rewards}) > 10


def test_demonstrations_are_half_one_style_with_a_few_words_of_others() -> None:
    own = off = total = 0
    for demonstration in islice(TASK.demonstrations(random.Random(0)), 2000):
        words = demonstration.pieces[1][0].split()[:-1]
        assert 8 <= len(words) <= 12
        counts = sorted(sum(word in lexicon for word in words) for lexicon in LEXICONS.values())
        own, off, total = own + counts[-1], off + sum(counts[:-1]), total + len(words)
    assert own / total == pytest.approx(0.52, abs=0.02)
    assert off / total == pytest.approx(0.04, abs=0.01)
