from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sao.cli.scorer_check import refuse_missing_targets
from sao.config import ConfigError, RunConfig, load_run_config

SOURCE = """
raise RuntimeError("whoever imports this loads a model")
import os.path as paths
from json import loads
wording, (left, *rest) = 1, (2, 3)
typed: int = 3
try:
    import numpy
except ImportError as error:
    fallback = None
if wording:
    class Made: ...
with open("x") as opened:
    def inner():
        hidden = 1
for number in rest: later = number
"""


def of_target(target: str) -> RunConfig:
    sets = ["reward.scorers.mine.kind=python", f'reward.scorers.mine.target="{target}"']
    return load_run_config(None, [*sets, 'reward.scorers.mine.components={wording="how it is written"}'], env={})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the working directory that must not be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / f"scorers_of_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(
    "name",
    ["wording", "left", "rest", "typed", "numpy", "fallback", "Made", "inner", "opened", "later", "loads", "paths"],
)
def test_a_name_that_the_module_may_bind_is_accepted_and_nothing_of_it_is_run(module: Path, name: str) -> None:
    assert refuse_missing_targets(of_target(f"{module.stem}:{name}")) == []
    assert module.stem not in sys.modules


@pytest.mark.parametrize("name", ["hidden", "wordings", "os", "path", "wording.upper"])
def test_a_name_that_it_does_not_bind_is_an_error(module: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"module {module.stem} has no '{name}': see {module}") as caught:
        refuse_missing_targets(of_target(f"{module.stem}:{name}"))
    assert caught.value.key == "reward.scorers.mine.target"


@pytest.mark.parametrize("line", ["from json import *", "def __getattr__(name): ..."])
def test_what_only_an_import_can_tell_is_accepted(module: Path, line: str) -> None:
    module.write_text(SOURCE + line)
    assert refuse_missing_targets(of_target(f"{module.stem}:anything")) == []


def test_a_module_that_is_no_python_is_an_error(module: Path) -> None:
    module.write_text("def :")
    with pytest.raises(ConfigError, match="cannot be read"):
        refuse_missing_targets(of_target(f"{module.stem}:wording"))


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("nowhere_to_be_found:wording", "no module nowhere_to_be_found on this machine"),
        ("nowhere_to_be_found.inner:wording", "module nowhere_to_be_found.inner cannot be looked for"),
        ("wording", "no entry point 'wording' of sao.scorers on this machine; there are none"),
    ],
)
def test_what_is_not_here_may_be_elsewhere(target: str, why: str) -> None:
    (doubt,) = refuse_missing_targets(of_target(target))
    assert doubt.key == "reward.scorers.mine.target"
    assert why in doubt.text


def test_what_has_no_source_is_accepted() -> None:
    assert refuse_missing_targets(of_target("math:sqrt")) == []
