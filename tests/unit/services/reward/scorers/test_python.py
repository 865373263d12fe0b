"""Where a target leads, and what stands in the error when it leads nowhere."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from sao.config import ConfigError
from services.reward.scorers import python
from services.reward.scorers.python import load_target
from tests.support.scorers import TOKENIZER, request

MODULE = """
class Length:
    def __call__(self, trajectory, tokenizer):
        return {"length": float(trajectory.action_count)}

class Broken:
    def __init__(self):
        raise RuntimeError("no licence")

class Awaited:
    async def __call__(self, trajectory, tokenizer):
        return {}

async def later(trajectory, tokenizer):
    return {}

def length(trajectory, tokenizer):
    return {"length": float(trajectory.action_count)}

number = 7
"""


@pytest.fixture(autouse=True)
def _own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_scorers.py").write_text(MODULE)
    (tmp_path / "broken_scorers.py").write_text("1 / 0")
    (tmp_path / "ending_scorers.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("own_scorers", "broken_scorers", "ending_scorers"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("target", ["own_scorers:length", "own_scorers:Length"])
def test_a_function_and_a_class_in_the_working_directory_are_found(target: str) -> None:
    assert load_target(target, key="k")(request().trajectory, TOKENIZER) == {"length": 3.0}


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("own_scorers:missing", "has no 'missing'"),
        ("nowhere:length", "cannot import nowhere"),
        ("broken_scorers:length", "ZeroDivisionError"),
        ("ending_scorers:length", "SystemExit: 0"),
        ("own_scorers:number", "is int, expected something to call"),
        ("own_scorers:Broken", "RuntimeError: no licence"),
        ("own_scorers:later", "is a coroutine function"),
        ("own_scorers:Awaited", "is a coroutine function"),
        ("no-such-entry", "nor an entry point of sao.scorers; there are none"),
    ],
)
def test_what_cannot_be_called_is_named_with_its_key(target: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^reward\.scorers\.x\.target: .*{reason}"):
        load_target(target, key="reward.scorers.x.target")


def test_an_entry_point_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = EntryPoints([EntryPoint("mine", "own_scorers:length", "sao.scorers")])
    sys.path.append(str(Path.cwd()))

    def entry_points(*, group: str) -> EntryPoints:
        return offered.select(group=group)

    monkeypatch.setattr(python, "entry_points", entry_points)
    assert load_target("mine", key="k")(request().trajectory, TOKENIZER) == {"length": 3.0}
    with pytest.raises(ConfigError, match="there are mine"):
        load_target("other", key="k")
