"""`sao weights` against the application of the weights service."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from sao.cli.main import app
from sao.telemetry.health import Health
from services.weights.app import build_app
from tests.support.processes import free_port
from tests.unit.services.weights.world import World


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Two versions, the second one serves; every client of httpx reaches its service, which wants a token."""
    made = World(tmp_path)
    await made.restore()
    for seed in (1, 2):
        await made.publish(seed)
        await made.settle(1.5)
    service = build_app(made.fleet, made.keepers, Health(60), SecretStr("secret"))

    def client(*, headers: dict[str, str], **_: Any) -> TestClient:
        return TestClient(service, headers=headers)

    monkeypatch.setattr(httpx, "Client", client)
    with capture_logs():  # which would be in the output of the command otherwise
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    root.mkdir()
    (root / "run.toml").write_text(f'[weights]\nport = {free_port()}\n[auth]\ntoken = "secret"\n')
    return root


def sao(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["weights", *map(str, arguments)])


async def test_versions_are_listed_with_what_became_of_them(world: World, folder: Path) -> None:
    result = sao("list", folder)
    assert result.exit_code == 0, result.output
    title, first, second, target, publishing = result.output.splitlines()
    assert title.split() == ["version", "update", "state", "created", "(UTC)", "MiB", "serving", "why"]
    assert first.split() == ["v00000001", "0", "earlier", "1970-01-01", "00:00:00", "0.0", "-"]
    assert second.split() == ["v00000002", "1", "target", "1970-01-01", "00:00:00", "0.0", "engine-0"]
    assert target == "target v00000002, newest published v00000002"
    assert publishing == "publishing goes on"
    assert json.loads(sao("list", folder, "--json").output)["target"] == "v00000002"


async def test_back_and_forth(world: World, folder: Path) -> None:
    result = sao("activate", folder, "v00000001", "--reason", "style collapsed")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "target v00000001, newest published v00000002",
        "publishing is held at v00000001 by activate from testclient: style collapsed",
    ]
    assert sao("hold", folder / "run.toml", "v00000002").exit_code == 0
    assert "v00000002  1       held" in sao("list", folder).output
    assert sao("resume", folder).output.splitlines()[1] == "publishing goes on"
    assert world.fleet.target is not None
    assert world.fleet.target.version == "v00000001"


async def test_a_refusal_is_told_and_ends_with_1(world: World, folder: Path) -> None:
    result = sao("activate", folder, "v00000009")
    assert result.exit_code == 1
    assert "HTTP 404: no complete version 'v00000009'" in result.stderr
    assert sao("activate", folder, "../v00000001").exit_code == 1
    (folder / "run.toml").write_text("[weights]\nport = 1\n")
    result = sao("resume", folder)
    assert result.exit_code == 1
    assert "HTTP 401: send Authorization" in result.stderr


def test_a_service_that_is_not_there_is_told_with_what_to_do(folder: Path) -> None:
    result = sao("list", folder)
    assert result.exit_code == 1
    assert "/v1/weights: ConnectError" in result.stderr
    assert "`sao status RUN`" in result.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [(None, "does not exist"), ("[weights]\nprot = 1\n", "weights.prot"), ("[weights]\n", "leaves weights.port open")],
)
def test_no_run_and_a_run_that_was_never_started_end_with_2(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "run.toml").write_text(text)
    result = sao("list", tmp_path)
    assert result.exit_code == 2
    assert told in result.stderr
