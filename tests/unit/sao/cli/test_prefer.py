"""`sao prefer` against the application of the reward service."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from sao.board.memory import MemoryBoard
from sao.cli import prefer as command
from sao.cli.main import app
from sao.preference_changes import ChangeRequest
from services.reward.preferences.routes import ensure_preference
from tests.support.processes import free_port
from tests.support.reward_app import wired
from tests.unit.services.reward.preferences.test_dry_run import archive
from tests.unit.services.reward.preferences.test_routes import CLASSICAL, CUTE, TASK


@pytest.fixture
async def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a reward service works on that every client of httpx reaches; it wants a token."""
    made = MemoryBoard()
    await ensure_preference(made, CUTE, TASK)
    service = wired(TASK, tmp_path / "run", board=made, token=SecretStr("secret")).app

    def client(*, headers: dict[str, str], **_: Any) -> TestClient:
        return TestClient(service, headers=headers)

    monkeypatch.setattr(httpx, "Client", client)
    with capture_logs():
        yield made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    root.mkdir()
    (root / "run.toml").write_text(f'[reward]\nport = {free_port()}\n[auth]\ntoken = "secret"\n')
    return root


def sao(*arguments: object, code: int = 0) -> Result:
    result = CliRunner(env={"COLUMNS": "160", "USER": "ann"}).invoke(app, ["prefer", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


async def test_a_weight_is_changed_and_taken_back(board: MemoryBoard, run: Path) -> None:
    said = sao(run, "cute=0.25", "style_classical=1", "--reason", "too sweet").output
    assert "version 2 is rewarded from now on; take it back: --rollback 1" in said
    current = await board.preference()
    assert current is not None
    assert current.document.weights == {**CUTE.weights, "style_cute": 0.25, "style_classical": 1.0}
    assert current.document.name == "cute=0.25 style_classical=1"
    assert (current.document.gates, current.author, current.reason) == (CUTE.gates, "ann", "too sweet")
    shown = sao(run).output
    assert "by ann: too sweet" in shown
    assert "style_classical" in shown
    assert "version 3 repeats version 1" in sao(run, "--rollback").output
    assert "version 4 repeats version 2" in sao(run, "--rollback", "2").output
    history = sao(run, "--history").output
    assert [line.split()[0] for line in history.splitlines()[1:]] == ["4", "3", "2", "1"]
    assert "rollback to 1" in history


async def test_what_people_write_is_shown_as_they_wrote_it(board: MemoryBoard, run: Path) -> None:
    name, reason = "[bold]cute[/bold]", "see [issue/7], not [/x] :smile:"
    said = sao(run, "cute=0.25", "--name", name, "--reason", reason).output
    assert name in said
    for words in ([], ["--history"]):
        shown = sao(run, *words).output
        assert name in shown
        assert reason in shown
    sao(run, "cute=1", "--at", "update:9", "--name", name, "--reason", reason)
    assert f"{name} at update 9 by ann: {reason}" in sao(run, "--scheduled").output


async def test_a_whole_document_is_read_from_a_file_and_weights_go_on_top(
    board: MemoryBoard, run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "p.json"
    file.write_text(CLASSICAL.model_dump_json())
    sao("--url", "http://reward:1", "--token", "secret", "--file", file, "--name", "mine", "quality=2")
    current = await board.preference()
    assert current is not None
    assert current.document == CLASSICAL.model_copy(
        update={"name": "mine", "weights": {**CLASSICAL.weights, "quality": 2.0}}
    )


async def test_a_change_that_others_overtook_is_refused_unless_forced(
    board: MemoryBoard, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = command._proposed

    def overtaken(*args: Any) -> Any:
        kept = board._kept
        kept.add(kept.changes[0].model_copy(update={"seq": kept.seq + 1, "version": kept.version + 1}))
        monkeypatch.setattr(command, "_proposed", real)
        return real(*args)

    monkeypatch.setattr(command, "_proposed", overtaken)
    result = sao(run, "cute=0", code=1)
    assert "HTTP 412: the preference is at version 2, expected 1" in result.stderr
    assert "--history" in result.stderr
    monkeypatch.setattr(command, "_proposed", overtaken)
    assert "version 4 is rewarded" in sao(run, "cute=0", "--force").output


async def test_a_dry_run_draws_both_distributions_and_stores_nothing(board: MemoryBoard, run: Path) -> None:
    assert "0 trained trajectories found" in sao(run, "cute=0", "--dry-run").output
    base = dict.fromkeys(TASK.components, 0.0) | {"quality": 1.0}
    archive(
        run / "archive",
        [("t1", base | {"style_cute": 1.0}), ("t2", base | {"style_classical": 1.0})],
        [("t3", {"quality": 1.0})],
    )
    said = sao(run, "cute=-0.5", "classical=0.5", "--dry-run").output
    assert "2 of the newest 3 trained trajectories, now under version 1" in said
    assert "█" in said
    assert "change side of the mean: 1 up, 1 down" in said
    assert "changes side" in said
    assert "1 lack style_cute" in said
    assert json.loads(sao(run, "cute=0", "--dry-run", "--json").output)["compared"] == 2
    assert "nothing would be learnt" in sao(run, "cute=0", "classical=0", "chuunibyou=0", "--dry-run").output
    assert len(await board.preference_changes(0)) == 1


async def test_a_switch_is_timed_listed_and_cancelled(board: MemoryBoard, run: Path) -> None:
    assert sao(run, "--scheduled").output == "no switch waits\n"
    assert "switch 2 waits for update 500" in sao(run, "cute=0", "--at", "update:500").output
    assert "switch 3 waits for 2" in sao(run, "cute=0.5", "--at", "+10m", "--reason", "dawn").output
    listed = sao(run, "--scheduled").output
    assert "2: cute=0 at update 500 by ann" in listed
    assert ": dawn" in listed
    assert "switch 2 is cancelled" in sao(run, "--cancel", 2).output
    assert "no switch 2 waits" in sao(run, "--cancel", 2, code=1).stderr
    (left,) = await board.scheduled_preferences()
    assert left.if_version == 1


@pytest.mark.parametrize(
    "when", ["+90s", "+1.5h", "+2d", "23:59", "00:00", "2999-01-31T14:00", "2999-01-31T14:00+09:00"]
)
def test_moments_are_understood_and_lie_ahead(when: str) -> None:
    assert command._moment(when)["at_s"] > time.time()


async def test_changes_are_held_and_go_on(board: MemoryBoard, run: Path) -> None:
    assert "changes are held since" in sao(run, "--hold", "--reason", "incident").output
    assert "by ann: incident" in sao(run).output
    assert "HTTP 423" in sao(run, "cute=0", code=1).stderr
    assert sao(run, "--resume").output == "changes go on\n"
    assert (await board.preference_hold()).held is False
    await board.change_preferences(ChangeRequest(what="hold"))
    assert json.loads(sao(run, "--resume", "--json").output)["held"] is False


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "name one run"),
        (["cute=1"], "name one run"),
        (["a", "b", "cute=1"], "found a b"),
        (["--url", "http://u", "RUN", "cute=1"], "--url already"),
        (["RUN", "cute=much"], "'much' is no number"),
        (["RUN", "--hold", "--rollback"], "--hold and --rollback do not go together"),
        (["RUN", "cute=1", "--history"], "--history and a change"),
        (["RUN", "--dry-run"], "give NAME=VALUE or --file"),
        (["RUN", "cute=1", "--at", "soon"], "--at soon: give +10m"),
        (["RUN", "wit=1"], "there is no component 'wit'; there are"),
        (["RUN", "style=1"], "there is no component 'style'"),
        (["RUN", "cute=nan"], "weights.style_cute"),
        (["RUN", "--file", "nowhere.json"], "nowhere.json: No such file"),
        (["RUN", "--file", "RUN/run.toml"], "is no preference document"),
        (["RUN", "--rollback"], "version 1 is the first"),
        (["nowhere", "cute=1"], "does not exist"),
    ],
)
async def test_what_makes_no_sense_ends_with_2_and_says_why(
    board: MemoryBoard, run: Path, words: list[str], told: str
) -> None:
    result = sao(*(word.replace("RUN", str(run)) for word in words), code=2)
    assert told in result.stderr
    assert len(await board.preference_changes(0)) == 1


def test_a_service_that_is_not_there_is_told_with_what_to_do(run: Path) -> None:
    result = sao(run, "cute=1", code=1)
    assert "ConnectError" in result.stderr
    assert "`sao status RUN`" in result.stderr


def test_a_run_that_was_never_started_is_told(run: Path) -> None:
    (run / "run.toml").write_text("")
    assert "leaves reward.port open" in sao(run, code=2).stderr
    (run / "run.toml").write_text("[reward]\nprot = 1\n")
    assert "reward.prot" in sao(run, code=2).stderr
