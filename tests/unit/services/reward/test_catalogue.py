"""The one set of component names of a run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sao.cli.task_check import refuse_unusable_task
from sao.config import ConfigError, RunConfig, load_run_config
from sao.config.doubts import doubts
from sao.config.dump import dump_run_config
from sao.config.schema import RewardSection
from services.reward.app import main
from services.reward.catalogue import Catalogue
from services.reward.scorers.memory import MemoryScorer
from tests.support.scored_tasks import SETTINGS, TwoScorersTask, always

JUDGE = 'kind = "judge"\nurl = "http://127.0.0.1:1/v1"\nmodel = "m"\ncomponents = { humour = "How funny" }\n'


async def _never(_: Any) -> Any:
    raise NotImplementedError


def scorer(name: str = "critic", *components: str) -> MemoryScorer:
    return MemoryScorer(name, dict.fromkeys(components or ("humour",), "text"), _never, deadline_s=3.0)


def test_it_lists_the_tasks_components_and_each_scorers() -> None:
    made = Catalogue(always(), SETTINGS, [scorer()])
    assert made.components == {"correct", "style", "humour"}
    assert [(entry.name, entry.scorer, entry.kind, entry.deadline_s) for entry in made.entries] == [
        ("correct", "steered", "task", 5.0),
        ("style", "steered", "task", 5.0),
        ("humour", "critic", "memory", 3.0),
    ]


def test_a_name_that_the_task_has_taken_is_refused_with_the_key() -> None:
    with pytest.raises(ConfigError, match=r"^reward\.scorers\.critic\.components: \['style'\]"):
        Catalogue(always(), SETTINGS, [scorer("critic", "style")])
    with pytest.raises(ConfigError, match=r"^reward\.scorers\.score: task steered has a scorer 'score' of its own"):
        Catalogue(always(), SETTINGS, [scorer("score")])
    two = TwoScorersTask(lambda *_: {}, lambda *_: {})
    with pytest.raises(ConfigError, match=r"^reward\.scorers\.correct: "):
        Catalogue(two, SETTINGS, [scorer("correct")])


def config(text: str, tmp_path: Any) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_run_config(path, env={})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            f"[reward.scorers.a]\n{JUDGE}[reward.scorers.b]\n{JUDGE}",
            r"^reward\.scorers\.b\.components: 'humour' is computed by scorer 'a' already",
        ),
        ("[reward.scorers.a]\nkind = 'oracle'\n", r"^reward\.scorers\.a: .*'python', 'http', 'judge'"),
        (f"[reward.scorers.a]\n{JUDGE}low = 1.0\nhigh = 0.0\n", r"^reward\.scorers\.a\.low: 1 must lie below high 0"),
        (f"[reward.scorers.a]\n{JUDGE}deadline_s = 0\n", r"^reward\.scorers\.a\.deadline_s: "),
        (f"[reward.scorers.a]\n{JUDGE}dead_line = 0\n", r"^reward\.scorers\.a\.dead_line: unknown key"),
        (f"[reward.scorers.A-b]\n{JUDGE}", r"^reward\.scorers\.A-b"),
        ("[reward.alarms]\nwindow = 10\n", r"^reward\.alarms\.window: "),
    ],
)
def test_a_wrong_scorer_is_named_by_its_key(text: str, error: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=error):
        config(text, tmp_path)


def test_scorers_and_alarms_survive_being_written_and_read(tmp_path: Any) -> None:
    text = (
        f"[reward.scorers.a]\n{JUDGE}low = -1.0\n[reward.alarms]\nenabled = false\n"
        '[reward.scorers.b]\nkind = "python"\ntarget = "m:f"\ncomponents = { length = "" }\n'
        '[reward.scorers.c]\nkind = "http"\nurl = "https://s/x"\ntoken_env = "T"\ncomponents = { wit = "" }\n'
    )
    asked = config(text, tmp_path)
    assert config(dump_run_config(asked), tmp_path) == asked
    assert asked.reward.more_components == {"humour", "length", "wit"}
    sets = ["kind=judge", "url=http://j/v1", "model=m", 'components={humour = "x"}']
    by_command = load_run_config(
        None, [*(f"reward.scorers.a.{one}" for one in sets), "reward.alarms.window=60"], env={}
    )
    assert by_command.reward.more_components == {"humour"}
    assert by_command.reward.alarms.window == 60


def test_sao_check_knows_the_scorers_components(tmp_path: Any) -> None:
    reads = '[preference]\nname = "p"\nweights = { humour = 1.0 }\n'
    task = '[task]\nname = "writing"\n'
    assert refuse_unusable_task(config(f"{task}{reads}[reward.scorers.a]\n{JUDGE}", tmp_path)) is None
    with pytest.raises(ConfigError, match=r"preference: reads \['humour'\]"):
        refuse_unusable_task(config(task + reads, tmp_path))
    taken = JUDGE.replace("humour", "quality")
    with pytest.raises(ConfigError, match=r"^reward\.scorers\.a\.components: \['quality'\]"):
        refuse_unusable_task(config(f"{task}[reward.scorers.a]\n{taken}", tmp_path))


def test_a_deadline_that_outlasts_the_claim_is_doubted(tmp_path: Any) -> None:
    text = f"[reward.scorers.a]\n{JUDGE}deadline_s = 20.0\n"
    assert any("scorers.a.deadline_s" in doubt.text for doubt in doubts(config(text, tmp_path)))
    assert not any("scorers.a" in doubt.text for doubt in doubts(config(f"[reward.scorers.a]\n{JUDGE}", tmp_path)))


def test_a_run_has_no_scorers_unless_it_says_so() -> None:
    assert RewardSection().more_components == frozenset()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            '[reward.scorers.a]\nkind = "python"\ntarget = "nowhere:f"\ncomponents = { wit = "" }\n',
            r"^reward\.scorers\.a\.target: cannot import nowhere",
        ),
        (
            f'[reward.scorers.a]\n{JUDGE}token_env = "SAO_TEST_NO_SUCH_TOKEN"\n',
            r"^reward\.scorers\.a\.token_env: .*SAO_TEST_NO_SUCH_TOKEN",
        ),
        (
            f"[reward.scorers.a]\n{JUDGE.replace('humour', 'correct')}",
            r"^reward\.scorers\.a\.components: \['correct'\]",
        ),
    ],
    ids=["target", "token", "components"],
)
async def test_the_service_does_not_start_with_a_scorer_that_cannot_work(text: str, error: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=error):
        await main(config(text, tmp_path), asyncio.Event())
