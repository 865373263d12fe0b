from __future__ import annotations

import re
from pathlib import Path

import pytest

from sao.preference import PreferenceDocument
from sao.tasks import BUILT_IN, TaskLoadError, load_task
from sao.tasks.base import OffersPreferences, WarmStartable
from sao.tasks.calculator import Calculator


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_built_in_task_carries_its_name_and_can_teach_a_tiny_model(name: str) -> None:
    task = load_task(name)
    assert task.name == name
    assert isinstance(task, WarmStartable)
    assert isinstance(task, OffersPreferences)
    assert task.default_preference in task.preferences.values()
    assert all(document.components <= task.components for document in task.preferences.values())
    assert task.prompts_path.exists()
    assert task.heldout_prompts_path.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chess", "none of calculator, writing"),
        ("module:", "not of the form"),
        ("no_such_package.thing:Task", "cannot import no_such_package.thing"),
        ("sao.tasks.calculator:Abacus", "has no class Abacus"),
        (f"{__name__}:HalfATask", "lacks prompts_path, heldout_prompts_path"),
        (f"{__name__}:TaskWithForeignPreference", "default_preference reads ['style_cute']"),
    ],
)
def test_what_is_no_task_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(TaskLoadError, match=re.escape(message)):
        load_task(name)


def test_a_task_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_task_module.py").write_text("from sao.tasks.calculator import Calculator as Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    assert load_task("my_own_task_module:Mine").name == "calculator"


class HalfATask:
    name = "half"


class TaskWithForeignPreference(Calculator):
    default_preference = PreferenceDocument(name="cute", weights={"style_cute": 1.0})
