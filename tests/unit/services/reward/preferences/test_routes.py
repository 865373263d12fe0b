from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from sao.board.memory import MemoryBoard
from sao.config import ConfigError
from sao.preference import Preference, PreferenceDocument
from sao.preference_changes import ChangeRequest, PreferenceChange
from sao.streams.base import StreamUnavailableError
from sao.tasks.writing import Writing
from services.reward.preferences.changes import MAX_BODY_BYTES
from services.reward.preferences.routes import ensure_preference
from tests.support.reward_app import wired

TASK = Writing()
CUTE = TASK.preferences["cute"]
CLASSICAL = TASK.preferences["classical"]
AWAY = StreamUnavailableError("no answer within 5 s")
URL = "/v1/preferences"


def app_of(board: Any, run_dir: Path, token: str | None = None) -> FastAPI:
    return wired(TASK, run_dir, board=board, token=SecretStr(token) if token else None).app


def client_of(board: Any, run_dir: Path, token: str | None = None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app_of(board, run_dir, token))
    return httpx.AsyncClient(transport=transport, base_url="http://reward")


@pytest.fixture
def board() -> MemoryBoard:
    return MemoryBoard()


@pytest.fixture
async def client(board: MemoryBoard, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    await board.put_preference(CUTE)
    async with client_of(board, tmp_path) as made:
        yield made


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    assert body["title"]
    assert body["instance"] == response.request.url.path
    return body


async def test_the_current_preference_has_its_version_as_etag(client: httpx.AsyncClient) -> None:
    response = await client.get(URL)
    assert response.status_code == 200
    assert response.headers["etag"] == '"1"'
    found = Preference.model_validate_json(response.content)
    assert (found.version, found.document, found.origin) == (1, CUTE, "put")
    assert (await client.get(URL, headers={"If-None-Match": '"1"'})).status_code == 304


async def test_put_makes_the_next_version_current_and_keeps_the_earlier(client: httpx.AsyncClient) -> None:
    response = await client.put(URL, content=CLASSICAL.model_dump_json())
    assert response.status_code == 200
    assert response.headers["etag"] == '"2"'
    assert response.json()["version"] == 2
    assert (await client.get(URL)).json()["document"]["name"] == "classical"
    assert (await client.get(f"{URL}/1")).json()["document"]["name"] == "cute"


@pytest.mark.parametrize("header", ['"1"', "*", None])
async def test_put_passes_when_the_condition_holds(client: httpx.AsyncClient, header: str | None) -> None:
    headers = {"If-Match": header} if header else {}
    assert (await client.put(URL, content=CLASSICAL.model_dump_json(), headers=headers)).status_code == 200


async def test_put_under_another_version_changes_nothing(client: httpx.AsyncClient, board: MemoryBoard) -> None:
    response = await client.put(URL, content=CLASSICAL.model_dump_json(), headers={"If-Match": '"7"'})
    assert "version 1, expected 7" in problem(response, 412)["detail"]
    current = await board.preference()
    assert current is not None
    assert current.version == 1


async def test_of_writers_with_the_same_condition_one_wins(client: httpx.AsyncClient) -> None:
    body, headers = CLASSICAL.model_dump_json(), {"If-Match": '"1"'}
    answers = await asyncio.gather(*(client.put(URL, content=body, headers=headers) for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] + [412] * 7


@pytest.mark.parametrize("header", ["1", 'W/"1"', '"x"', '"1", "2"'])
async def test_an_if_match_that_is_no_etag_is_refused(client: httpx.AsyncClient, header: str) -> None:
    response = await client.put(URL, content=CLASSICAL.model_dump_json(), headers={"If-Match": header})
    assert "If-Match" in problem(response, 400)["detail"]


async def test_components_the_task_does_not_have_are_named(client: httpx.AsyncClient) -> None:
    document = {
        "name": "p",
        "weights": {"quality": 1.0, "humour": 1.0},
        "gates": ["politeness"],
        "thresholds": {"wit": 0.5},
    }
    body = problem(await client.put(URL, json=document), 422)
    assert body["unknown_components"] == ["humour", "politeness", "wit"]
    assert body["components"] == sorted(TASK.components)
    assert "humour" in body["detail"]


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"wieghts": {}}, "/wieghts"),
        ({"weights": {}}, "/weights"),
        ({"weights": {"quality": "1"}}, "/weights/quality"),
        ({"weights": {"quality": True}}, "/weights/quality"),
        ({"offset": "0.5"}, "/offset"),
        ({"name": ""}, "/name"),
        ({"low": 1.0, "high": 0.0}, ""),
        ({"gates": ["Quality!"]}, "/gates/0"),
    ],
)
async def test_a_malformed_document_is_refused_with_the_place(
    client: httpx.AsyncClient, change: dict[str, Any], pointer: str
) -> None:
    document = {"name": "p", "weights": {"quality": 1.0}} | change
    errors = problem(await client.put(URL, json=document), 422)["errors"]
    assert any(error["pointer"].startswith(pointer) for error in errors)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"name": "p", "weights": {"quality": NaN}}', b"\xff"])
async def test_what_is_no_document_is_refused(client: httpx.AsyncClient, board: MemoryBoard, body: bytes) -> None:
    problem(await client.put(URL, content=body), 422)
    assert await board.preference(2) is None


async def test_an_endless_body_is_refused(client: httpx.AsyncClient) -> None:
    problem(await client.put(URL, content=b" " * (MAX_BODY_BYTES + 1)), 413)


@pytest.mark.parametrize("version", ["2", "0", "-1", "9007199254740992"])
async def test_a_version_that_does_not_exist_is_not_found(client: httpx.AsyncClient, version: str) -> None:
    assert version in problem(await client.get(f"{URL}/{version}"), 404)["detail"]
    assert version in problem(await client.post(f"{URL}/{version}:rollback"), 404)["detail"]


@pytest.mark.parametrize("version", ["newest", "1.5", "9" * 20, "9" * 5000], ids=lambda version: version[:20])
async def test_what_is_no_version_is_refused(client: httpx.AsyncClient, version: str) -> None:
    assert "version" in problem(await client.get(f"{URL}/{version}"), 422)["detail"]
    assert "version" in problem(await client.post(f"{URL}/{version}:rollback"), 422)["detail"]


async def test_another_method_is_refused(client: httpx.AsyncClient) -> None:
    problem(await client.delete(URL), 405)
    problem(await client.get("/v2/preferences"), 404)


async def test_with_a_token_only_its_bearer_may_read_or_write(board: MemoryBoard, tmp_path: Path) -> None:
    await board.put_preference(CUTE)
    good = {"Authorization": "Bearer s3cret"}
    async with client_of(board, tmp_path, token="s3cret") as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            response = await client.put(URL, content=CLASSICAL.model_dump_json(), headers=headers)
            problem(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
            problem(await client.get(URL, headers=headers), 401)
        assert await board.preference(2) is None
        assert (await client.get(URL, headers=good)).status_code == 200
        assert (await client.put(URL, content=CLASSICAL.model_dump_json(), headers=good)).status_code == 200


async def test_a_store_that_does_not_answer_is_503(tmp_path: Path) -> None:
    class Away(MemoryBoard):
        async def preference(self, version: int | None = None) -> Preference | None:
            raise AWAY

    async with client_of(Away(), tmp_path) as client:
        response = await client.get(URL)
    assert "no answer within 5 s" in problem(response, 503)["detail"]
    assert response.headers["retry-after"] == "1"


async def test_the_index_names_the_endpoints_and_telemetry_is_beside_it(client: httpx.AsyncClient) -> None:
    index = (await client.get("/")).json()
    assert index["components"] == sorted(TASK.components)
    assert any("/v1/preferences" in endpoint for endpoint in index["endpoints"])
    assert (await client.get("/healthz")).status_code == 200
    assert (await client.get("/readyz")).status_code == 503
    assert "sao_reward_preference_version" in (await client.get("/metrics")).text
    schema = (await client.get("/openapi.json")).json()
    assert "weights" in json.dumps(schema["paths"][URL]["put"]["requestBody"])


async def test_the_first_preference_is_the_run_files_or_the_tasks(board: MemoryBoard) -> None:
    assert (await ensure_preference(MemoryBoard(), None, TASK)).document == TASK.default_preference
    assert (await ensure_preference(board, CLASSICAL, TASK)).document == CLASSICAL
    # A restart keeps what the run has, whatever the file says.
    kept = await ensure_preference(board, CUTE, TASK)
    assert (kept.version, kept.document, kept.origin) == (1, CLASSICAL, "initial")


async def test_a_first_preference_for_another_task_is_a_configuration_error(board: MemoryBoard) -> None:
    foreign = PreferenceDocument(name="p", weights={"correct": 1.0})
    with pytest.raises(ConfigError, match=r"preference: the run file's preference reads \['correct'\]"):
        await ensure_preference(board, foreign, TASK)
    assert await board.preference() is None
    await board.put_preference(foreign)
    with pytest.raises(ConfigError, match="version 1 of this run"):
        await ensure_preference(board, CUTE, TASK)


async def test_two_services_that_start_together_agree_on_the_first_preference() -> None:
    class Late(MemoryBoard):
        """Another service stores its preference just before ours."""

        async def change_preferences(
            self, asked: ChangeRequest, *, above: int = 0, min_seconds: float = 0.0
        ) -> PreferenceChange | None:
            if await self.preference() is None:
                await super().change_preferences(ChangeRequest(what="initial", document=CLASSICAL))
            return await super().change_preferences(asked, above=above, min_seconds=min_seconds)

    assert (await ensure_preference(Late(), CUTE, TASK)).document == CLASSICAL


async def test_a_client_that_hangs_up_within_its_document_changes_nothing_and_raises_nothing(
    board: MemoryBoard, tmp_path: Path
) -> None:
    app = app_of(board, tmp_path)
    messages: Iterator[MutableMapping[str, Any]] = iter(
        [{"type": "http.request", "body": b'{"name": ', "more_body": True}, {"type": "http.disconnect"}]
    )
    answers: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return next(messages)

    async def send(message: MutableMapping[str, Any]) -> None:
        answers.append(message)

    await app({"type": "http", "method": "PUT", "path": URL, "headers": [], "query_string": b""}, receive, send)
    assert answers[0]["status"] == 400  # nobody reads it
    assert await board.preference() is None
