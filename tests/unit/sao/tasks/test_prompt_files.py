from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.tasks import make_prompts
from sao.tasks.base import Prompt
from sao.tasks.calculator import Calculator
from sao.tasks.prompt_files import FOLDER, PromptFileError, load_prompts, prompt_for, save_prompts
from sao.tasks.writing import TOPICS, Writing


@settings(deadline=None)
@given(count=st.integers(1, 40), seed=st.integers(0, 2**31), epoch=st.integers(0, 5))
def test_each_epoch_gives_every_prompt_once(count: int, seed: int, epoch: int) -> None:
    prompts = [Prompt(str(i), "", {}) for i in range(count)]
    walked = [prompt_for(prompts, epoch * count + i, seed).id for i in range(count)]
    assert sorted(walked) == sorted(prompt.id for prompt in prompts)


def test_the_order_is_the_same_for_ever() -> None:
    prompts = [Prompt(str(i), "", {}) for i in range(6)]
    assert [prompt_for(prompts, i, seed=0).id for i in range(12)] == list("412305304125")


def test_another_seed_is_another_order() -> None:
    prompts = [Prompt(str(i), "", {}) for i in range(50)]
    orders = {tuple(prompt_for(prompts, i, seed).id for i in range(50)) for seed in range(4)}
    assert len(orders) == 4


@pytest.mark.parametrize(("count", "ordinal"), [(0, 0), (3, -1)])
def test_there_is_no_prompt_before_the_first_or_among_none(count: int, ordinal: int) -> None:
    with pytest.raises(IndexError, match=f"ordinal {ordinal}"):
        prompt_for([Prompt(str(i), "", {}) for i in range(count)], ordinal, 0)


_PROMPTS = st.lists(
    st.builds(
        Prompt,
        st.text(min_size=1),
        st.text(),
        st.dictionaries(st.text().filter(lambda key: key not in {"id", "text"}), st.integers() | st.text()),
    ),
    min_size=1,
    unique_by=lambda prompt: prompt.id,
)


@settings(deadline=None)
@given(prompts=_PROMPTS)
def test_what_is_saved_loads_equal(prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("prompts") / "file.jsonl"
    save_prompts(path, prompts)
    assert load_prompts(path) == prompts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ('{"id": "a", "text": "x"}\n\n{"id": "a", "text": "y"}\n', ":3: prompt id 'a' is taken by line 1"),
        ('{"id": "a", "text": "x"}\n{oops', ":2: not JSON"),
        ("[1]", ":1: found list"),
        ('{"id": "", "text": "x"}', ":1: expected a non-empty string id"),
        ('{"id": "a"}', "text None"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(PromptFileError) as caught:
        load_prompts(path)
    assert message in str(caught.value)


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="nowhere"):
        load_prompts(tmp_path / "nowhere.jsonl")


def test_the_committed_files_are_what_the_script_makes(tmp_path: Path) -> None:
    make_prompts.main(tmp_path)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(path.name for path in FOLDER.glob("*.jsonl"))
    for name in made:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_no_calculation_is_both_trained_on_and_held_out() -> None:
    train = {prompt.text for prompt in load_prompts(Calculator.prompts_path)}
    heldout = {prompt.text for prompt in load_prompts(Calculator.heldout_prompts_path)}
    assert (len(train), len(heldout)) == (4096, 256)
    assert not train & heldout


def test_writing_asks_for_every_topic_equally_often() -> None:
    texts = [prompt.text for prompt in load_prompts(Writing.prompts_path)]
    assert len(texts) >= 256
    assert {texts.count(topic) for topic in TOPICS} == {len(texts) // len(TOPICS)}
