from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.config import load_run_config
from sao.tasks import load_task
from sao.tasks.base import Prompt, UnscorableError
from sao.tasks.prompt_files import load_prompts
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from tests.support.rollouts import play, recorded

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "reverse"
CONFIG = load_run_config(EXAMPLE / "run.toml", env={})
TASK = load_task(CONFIG.task.name)
TOKENIZER = tokenizer_of_run(CONFIG.model.path, TASK)


def test_the_run_file_leads_to_the_users_own_class() -> None:
    assert type(TASK).__module__ == "examples.reverse.task"
    assert TASK.name == "reverse"


def test_its_prompts_load_and_are_disjoint() -> None:
    train, heldout = load_prompts(TASK.prompts_path), load_prompts(TASK.heldout_prompts_path)
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in heldout}


@pytest.mark.parametrize(
    ("answer", "exact", "in_place"),
    [("4813<eos>", 1, 1.0), ("4813", 0, 1.0), ("4893<eos>", 0, 0.75), ("48130<eos>", 0, 0.8), ("<eos>", 0, 0.0)],
)
def test_its_components(answer: str, exact: int, in_place: float) -> None:
    trajectory = play(TASK, Prompt("p", "3184", {}), TOKENIZER, [answer])
    assert TASK.score(trajectory, TOKENIZER) == {"exact": exact, "in_place": in_place}


@settings(deadline=None)
@given(action=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=12))
def test_its_reward_is_in_range_for_any_tokens(action: list[int]) -> None:
    components = TASK.score(recorded([1], [(action, [])], {"wanted": "4813"}), TOKENIZER)
    assert components.keys() == TASK.components
    assert 0 <= TASK.default_preference.value(components) <= 1


def test_a_trajectory_without_the_wanted_text_is_unscorable() -> None:
    with pytest.raises(UnscorableError, match="wanted"):
        TASK.score(recorded([1], [([2], [])], {}), TOKENIZER)
