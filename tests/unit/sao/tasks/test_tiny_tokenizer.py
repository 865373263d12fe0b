from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.reverse.task import Reverse
from sao.tasks import load_task
from sao.tasks.base import WarmStartable
from sao.tasks.calculator import Calculator
from sao.tasks.tiny_tokenizer import VocabularyError, build_tokenizer_json, tiny_vocabulary, tokenizer_of_run
from sao.tasks.writing import Writing

TASKS = [Calculator(), Writing(), Reverse()]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@settings(deadline=None)
@given(data=st.data())
def test_any_ids_survive_the_way_through_text(task: WarmStartable, data: st.DataObject) -> None:
    tokenizer = tokenizer_of_run(None, task)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_ids_follow_the_vocabulary_and_are_padded_to_eight(task: WarmStartable) -> None:
    tokenizer = tokenizer_of_run(None, task)
    names = [*task.special_tokens, *task.vocabulary]
    assert [tokenizer.token_id(name) for name in names] == list(range(len(names)))
    assert tokenizer.vocab_size % 8 == 0
    assert tokenizer.vocab_size - len(names) < 8


def test_the_calculator_has_a_vocabulary_of_32() -> None:
    assert tokenizer_of_run(None, Calculator()).vocab_size == 32


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_demonstrations_stay_inside_the_vocabulary_and_within_words(task: WarmStartable) -> None:
    tokenizer = tokenizer_of_run(None, task)
    joint = " " if task.token_unit == "word" else ""
    for demonstration in islice(task.demonstrations(random.Random(1)), 200):
        pieces = [tokenizer.encode(text) for text, _ in demonstration.pieces]
        whole = tokenizer.encode(joint.join(text for text, _ in demonstration.pieces))
        assert [token for piece in pieces for token in piece] == whole


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_text_outside_the_vocabulary_is_an_error(task: WarmStartable) -> None:
    with pytest.raises(Exception, match="Missing"):
        tokenizer_of_run(None, task).encode("Zebra")


def test_a_checkpoint_brings_its_own_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(build_tokenizer_json(Writing()))
    assert tokenizer_of_run(tmp_path, Calculator()).token_id("moon") == 4


def test_a_task_without_vocabulary_needs_a_checkpoint() -> None:
    class Bare:
        name = "bare"

    bare: Any = Bare()
    with pytest.raises(VocabularyError, match=r"bare.*model\.path"):
        tokenizer_of_run(None, bare)


@pytest.mark.parametrize(
    ("special", "words", "unit", "message"),
    [
        (("<pad>", "<bos>"), ("a",), "char", "first three"),
        (("<pad>", "<bos>", "<eos>"), ("a", "a"), "char", r"twice.*'a'"),
        (("<pad>", "<bos>", "eos"), ("a",), "char", r"unusable.*'eos'"),
        (("<pad>", "<bos>", "<e s>"), ("a",), "word", r"unusable.*'<e s>'"),
        (("<pad>", "<bos>", "<eos>"), ("<",), "char", r"unusable.*'<'"),
        (("<pad>", "<bos>", "<eos>"), ("ab",), "char", r"unusable.*'ab'"),
        (("<pad>", "<bos>", "<eos>"), ("a b",), "word", r"unusable.*'a b'"),
        (("<pad>", "<bos>", "<eos>"), ("",), "word", r"unusable.*''"),
    ],
)
def test_a_vocabulary_that_text_cannot_tell_apart_is_refused(
    special: tuple[str, ...], words: tuple[str, ...], unit: str, message: str
) -> None:
    task: Any = load_task("calculator")
    task.special_tokens, task.vocabulary, task.token_unit = special, words, unit
    with pytest.raises(VocabularyError, match=message):
        tiny_vocabulary(task)
