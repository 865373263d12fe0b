"""docs/scorers.md: the example works as it is printed, and every run file in it is one."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from sao.board.memory import MemoryBoard
from sao.config import load_run_config
from sao.outcome import Invalid, Scored
from sao.tasks import load_task
from sao.tasks.base import Prompt
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from services.reward.catalogue import Catalogue
from services.reward.preferences.routes import ensure_preference
from services.reward.scorer import TrajectoryScorer
from services.reward.scorers import connect
from tests.conftest import ROOT
from tests.support.rollouts import play
from tools.metrics_docs import declared

PAGE = (ROOT / "docs" / "scorers.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TOML = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


async def test_the_first_example_scores_as_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(PYTHON[0].splitlines()) <= 20
    (tmp_path / "my_scorers.py").write_text(PYTHON[0])
    (tmp_path / "my-run.toml").write_text(TOML[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_scorers", raising=False)
    config = load_run_config(Path("my-run.toml"), env={})
    task = load_task(config.task.name)
    tokenizer, scorers, board = tokenizer_of_run(None, task), connect(config), MemoryBoard()
    catalogue = Catalogue(task, config.reward, scorers)
    await ensure_preference(board, config.preference, catalogue)
    scorer = TrajectoryScorer(task, tokenizer, board.preference, config.reward, scorers=scorers)

    async def score(text: str) -> object:
        return await scorer.score(play(task, Prompt("p", "moon", {}), tokenizer, [text]).message.SerializeToString())

    outcome = await score("nyan nyan sparkle moon tea sea rain <eos>")
    assert isinstance(outcome, Scored)
    assert outcome.components["brevity"] == pytest.approx(0.8)
    assert outcome.components["variety"] == pytest.approx(7 / 8)
    assert outcome.value == pytest.approx(0.5 * 3 / 7 + 0.5 * 7 / 8)
    empty = play(task, Prompt("p", "moon", {}), tokenizer, ["<eos>"])
    empty.message.segments[0].ClearField("token_ids")
    assert await scorer.score(empty.message.SerializeToString()) == Invalid(reason="wording: it wrote nothing")


@pytest.mark.parametrize("text", TOML, ids=lambda text: text.splitlines()[0])
def test_every_run_file_on_the_page_is_one(text: str, tmp_path: Path) -> None:
    if "entry-points" in text:
        assert tomllib.loads(text)["project"]["entry-points"]["sao.scorers"]
        return
    (tmp_path / "run.toml").write_text(text)
    load_run_config(tmp_path / "run.toml", env={})


@pytest.mark.parametrize("name", re.findall(r"`(sao_reward_[a-z_]+)", PAGE))
def test_every_metric_on_the_page_is_there(name: str) -> None:
    assert name in {row[0] for row in declared("reward")}


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http|#)([^)#]+)\)", PAGE))))
def test_every_link_leads_somewhere(target: str) -> None:
    assert (ROOT / "docs" / target).exists()
