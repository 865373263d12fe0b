"""`sao score`: with the task alone, and against the application of the reward service."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from sao.cli.main import app
from sao.tasks.base import Prompt
from sao.v1 import trajectory_pb2 as pb
from tests.support.processes import free_port
from tests.support.rollouts import play
from tests.support.scorers import TASK, TOKENIZER
from tests.support.scoring_service import Service

TEXT = "nyan sparkle fluffy tiny moon street window door"


@pytest.fixture
async def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    """Every client of httpx reaches this one, which wants a token."""
    made = Service(tmp_path)
    await made.board.put_preference(TASK.default_preference)

    def client(*, headers: dict[str, str], **_: Any) -> TestClient:
        return TestClient(made.app, headers=headers)

    monkeypatch.setattr(httpx, "Client", client)
    with capture_logs():
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    root.mkdir()
    (root / "run.toml").write_text(f'[reward]\nport = {free_port()}\n[auth]\ntoken = "s3cret"\n')
    return root


def sao(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["score", *map(str, arguments)])


def written(path: Path, *objects: object) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))
    return path


def test_texts_are_scored_by_the_task_alone(tmp_path: Path) -> None:
    file = written(tmp_path / "texts.jsonl", {"text": TEXT, "prompt": "moon"}, f"{TEXT} <eos>")
    result = sao(file, "--task", "writing")
    assert result.exit_code == 0, result.output
    title, _, first, second = (line.split(maxsplit=3) for line in result.stdout.splitlines())
    assert title == ["preference", "cute"]
    parts = "quality 1, style_chuunibyou 0, style_classical 0, style_cute 0.5"
    assert [one.strip() for one in first] == ["texts.jsonl:1", "scored", "0.7500", parts]
    assert second[1:] == first[1:]


def test_another_preference_and_json_lines(tmp_path: Path) -> None:
    document = tmp_path / "plain.json"
    document.write_text('{"name": "plain", "weights": {"quality": 0.5}}')
    file = written(tmp_path / "one.json", [{"text": f"{TEXT} <eos>"}])
    result = sao(file, "--task", "writing", "--preference", document, "--json")
    (line,) = map(json.loads, result.stdout.splitlines())
    assert line["name"] == "one.json:1"
    assert (line["preference"], line["version"], line["outcome"]["value"]) == ("plain", None, 0.5)


def test_a_protobuf_file_is_one_trajectory(tmp_path: Path) -> None:
    made = play(TASK, Prompt("p", "moon", {}), TOKENIZER, [f"{TEXT} <eos>"])
    file = tmp_path / "x.pb"
    file.write_bytes(made.message.SerializeToString())
    (line,) = map(json.loads, sao(file, "--task", "writing", "--json").stdout.splitlines())
    assert line["trajectory_id"] == made.id
    assert line["outcome"]["value"] == 0.75


@pytest.mark.parametrize("where", [".", "run.toml", "http://reward/"])
def test_a_service_is_asked_under_its_current_preference(
    service: Service, folder: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAO__AUTH__TOKEN", "s3cret")
    file = written(tmp_path / "texts.jsonl", {"text": TEXT, "prompt": "moon"})
    result = sao(file, *(["--url", where] if "http" in where else ["--run-dir", folder / where]))
    assert result.exit_code == 0, result.output
    assert "preference cute, version 1" in result.stdout
    assert "0.7500" in result.stdout


def test_a_judge_of_the_service_that_fails_is_told_and_is_exit_1(
    service: Service, folder: Path, tmp_path: Path
) -> None:
    service.humour = RuntimeError("no licence")
    document = tmp_path / "funny.json"
    document.write_text('{"name": "funny", "weights": {"humour": 1.0}}')
    file = written(tmp_path / "texts.jsonl", {"text": TEXT})
    result = sao(file, "--run-dir", folder, "--preference", document)
    assert result.exit_code == 1
    assert "infra_failed" in result.stdout
    assert "critic: RuntimeError: no licence" in result.stdout


def test_what_the_service_refuses_is_said(service: Service, folder: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "texts.jsonl", {"trajectory_id": "no-such"})
    result = sao(file, "--run-dir", folder)
    assert result.exit_code == 1
    assert "HTTP 404" in result.stderr
    (folder / "run.toml").write_text(f"[reward]\nport = {free_port()}\n")
    assert "HTTP 401" in sao(file, "--run-dir", folder).stderr


def test_no_service_is_exit_1_with_what_to_do(folder: Path, tmp_path: Path) -> None:
    result = sao(written(tmp_path / "texts.jsonl", {"text": TEXT}), "--run-dir", folder)
    assert result.exit_code == 1
    assert "ConnectError" in result.stderr
    assert "sao status" in result.stderr


def test_a_judges_component_without_a_service_is_no_number(tmp_path: Path) -> None:
    document = tmp_path / "funny.json"
    document.write_text('{"name": "funny", "weights": {"humour": 1.0}}')
    result = sao(written(tmp_path / "t.jsonl", {"text": TEXT}), "--task", "writing", "--preference", document, "--json")
    assert result.exit_code == 1
    outcome = json.loads(result.stdout)["outcome"]
    assert outcome["kind"] == "infra_failed"
    assert "does not compute humour" in outcome["reason"]


def test_a_trajectory_that_can_never_be_scored_is_invalid(tmp_path: Path) -> None:
    file = written(tmp_path / "t.jsonl", {"text": "<ans>+0001<eos>"})
    result = sao(file, "--task", "calculator", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["outcome"]["kind"] == "invalid"


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("t.jsonl", '{"text": "nyan"}', [], "say who computes"),
        ("t.jsonl", '{"text": "nyan"}', ["--task", "writing", "--url", "http://x"], "in one way"),
        ("t.jsonl", '{"text": "nyan"}', ["--task", "no-such"], "is none of calculator, writing"),
        ("t.jsonl", '{"text": "nyan"}', ["--url", "http://x", "--model", "m"], "--model goes with --task"),
        ("t.jsonl", '{"text": "nyan"}', ["--run-dir", "nowhere"], "does not exist"),
        ("t.jsonl", '{"text": "nyan"}', ["--task", "writing", "--preference", "nowhere.json"], "No such file"),
        ("t.jsonl", '{"text": "submarine"}', ["--task", "writing"], "task writing makes no trajectory of this"),
        ("t.jsonl", '{"trajectory_id": "x"}', ["--task", "writing"], "only a service finds a trajectory"),
        ("t.jsonl", '{"trajectory": "%"}', ["--task", "writing"], "not a sao.v1.Trajectory"),
        ("t.jsonl", '{"words": "nyan"}', ["--task", "writing"], "t.jsonl:1: "),
        ("t.jsonl", "{", ["--task", "writing"], "not JSON"),
        ("t.json", "[]", ["--task", "writing"], "holds nothing to score"),
        ("t.json", "7", ["--task", "writing"], "t.json:1: "),
    ],
)
def test_what_is_wrong_with_file_or_options_is_exit_2(
    name: str, content: str, options: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    result = sao(tmp_path / name, *options)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_a_file_that_is_not_there_is_exit_2(tmp_path: Path) -> None:
    assert sao(tmp_path / "none.jsonl", "--task", "writing").exit_code == 2


def test_empty_bytes_are_a_trajectory_that_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.pb").write_bytes(pb.Trajectory().SerializeToString())
    result = sao(tmp_path / "x.pb", "--task", "calculator", "--json")
    assert json.loads(result.stdout)["outcome"]["kind"] == "invalid"


def test_no_name_is_cut_in_a_narrow_terminal(tmp_path: Path) -> None:
    file = written(tmp_path / "a-file-of-a-rather-long-name.jsonl", {"text": TEXT, "prompt": "moon"})
    result = CliRunner(env={"COLUMNS": "60"}).invoke(app, ["score", str(file), "--task", "writing"])
    assert "…" not in result.stdout
    assert {"style_chuunibyou", "style_classical", "style_cute"} <= set(result.stdout.split())
