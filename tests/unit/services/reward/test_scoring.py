"""GET /v1/components and POST /v1/score, without a network."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sao.archive import Archive
from sao.preference import PreferenceDocument
from sao.rows import TrainedRow, UpdateRow
from sao.streams.base import StreamName, StreamUnavailableError
from sao.tasks.base import Prompt
from sao.trajectory import Trajectory
from sao.v1 import archive_pb2
from services.reward import metrics
from services.reward.scoring import AT_A_TIME, MAX_BODY_BYTES
from tests.support.rollouts import play
from tests.support.scored_tasks import until
from tests.support.scorers import TASK, TOKENIZER
from tests.support.scoring_service import Service

TEXT = "nyan sparkle fluffy tiny moon street window door"
FUNNY = PreferenceDocument(name="funny", weights={"humour": 1.0}, rubric="Puns are funny.")


@pytest.fixture
async def service(tmp_path: Path) -> Service:
    made = Service(tmp_path)
    await made.board.put_preference(TASK.default_preference)
    return made


def trajectory(text: str = f"{TEXT} <eos>") -> Trajectory:
    return play(TASK, Prompt("p", "moon", {}), TOKENIZER, [text])


async def test_the_components_of_task_and_scorers_are_listed(service: Service) -> None:
    async with service.client() as client:
        body = (await client.get("/v1/components")).json()
        index = (await client.get("/")).json()
    assert [(one["name"], one["scorer"], one["kind"]) for one in body["components"]] == [
        ("quality", "writing", "task"),
        ("style_chuunibyou", "writing", "task"),
        ("style_classical", "writing", "task"),
        ("style_cute", "writing", "task"),
        ("humour", "critic", "memory"),
    ]
    assert body["components"][-1]["description"] == "How funny"
    assert body["components"][-1]["deadline_s"] == 0.2
    assert index["components"] == ["humour", "quality", "style_chuunibyou", "style_classical", "style_cute"]


async def test_a_text_is_scored_under_the_current_preference_and_asks_no_judge(service: Service) -> None:
    answer = (await service.score(text=TEXT, prompt="moon")).json()
    assert answer["preference"] == "cute"
    assert answer["version"] == 1
    outcome = answer["outcome"]
    assert outcome["kind"] == "scored"
    assert outcome["components"] == {"quality": 1, "style_cute": 0.5, "style_chuunibyou": 0, "style_classical": 0}
    assert outcome["value"] == 0.75
    assert service.asked == 0


async def test_a_given_preference_asks_the_judge_and_has_no_version(service: Service) -> None:
    answer = (await service.score(text=TEXT, prompt="moon", preference=FUNNY.model_dump())).json()
    assert answer["version"] is None
    assert answer["outcome"]["value"] == 0.5
    assert answer["outcome"]["judged"] == {"humour": FUNNY.rubric_id}
    assert (await service.board.preference()).version == 1  # type: ignore[union-attr]


async def test_failures_are_answers_with_their_type(service: Service) -> None:
    service.humour = RuntimeError("no licence")
    answer = (await service.score(text=TEXT, preference=FUNNY.model_dump())).json()
    expected = {"kind": "infra_failed", "component": "critic", "reason": "RuntimeError: no licence"}
    assert answer["outcome"] == expected
    service.held = asyncio.Event()
    answer = (await service.score(text=TEXT, preference=FUNNY.model_dump())).json()
    assert answer["outcome"] == {"kind": "timeout", "component": "critic", "after_s": 0.2}


async def test_a_trajectory_is_scored_from_its_bytes(service: Service) -> None:
    made = trajectory()
    encoded = base64.b64encode(made.message.SerializeToString()).decode()
    answer = (await service.score(trajectory=encoded)).json()
    assert answer["trajectory_id"] == made.id
    assert answer["outcome"]["value"] == 0.75


async def test_a_trajectory_on_a_stream_is_found_by_its_id_and_stays_where_it_is(service: Service) -> None:
    made = trajectory()
    await service.streams.append(made.id, made.message.SerializeToString(), ordinal=0, sample=0, fields={})
    answer = (await service.score(trajectory_id=made.id)).json()
    assert answer["outcome"]["value"] == 0.75
    depth = await service.streams.depth(StreamName.TRAJECTORIES)
    assert (depth.length, depth.pending) == (1, 0)


async def test_a_trained_trajectory_is_found_in_the_archive(service: Service) -> None:
    made = trajectory()
    trained = archive_pb2.TrainedTrajectory(trajectory=made.message)
    Archive(service.folder / "archive").append(
        archive_pb2.ArchivedUpdate(update=7, trainer_epoch=1, trajectories=[trained])
    )
    row = UpdateRow(
        update=7,
        critic_only=False,
        version="",
        trainer_epoch=1,
        preference_version=1,
        finished_s=1.0,
        trajectories=[_row(made)],
        dropped={},
        metrics={},
    )
    (service.folder / "updates.jsonl").write_text(row.model_dump_json() + "\n")
    assert (await service.score(trajectory_id=made.id)).json()["outcome"]["value"] == 0.75


def _row(made: Trajectory) -> TrainedRow:
    values: dict[str, Any] = dict.fromkeys(TrainedRow.model_fields, 0)
    return TrainedRow.model_validate({**values, "id": made.id, "finish_reason": "stop", "components": {}})


async def test_an_id_that_nobody_knows_is_404(service: Service) -> None:
    response = await service.score(trajectory_id="no-such")
    assert response.status_code == 404
    assert "no-such" in response.json()["detail"]
    assert not (service.folder / "archive").exists()


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({}, "found none of text, trajectory, trajectory_id"),
        ({"text": "nyan", "trajectory_id": "x"}, "found text and trajectory_id"),
        ({"trajectory_id": "x", "prompt": "moon"}, "belong to a text"),
        ({"text": ""}, "/text"),
        ({"text": "nyan", "extra": 1}, "/extra"),
        ({"trajectory_id": None, "text": None}, "found text and trajectory_id"),
        ({"text": None}, "and not null"),
        ({"trajectory": "%%%"}, "/trajectory"),
        ({"text": "nyan", "preference": {"name": "p", "weights": {"wit": 1.0}}}, "does not compute wit"),
        ({"text": "nyan", "preference": {"name": "p", "weights": {}}}, "/preference/weights"),
    ],
    ids=str,
)
async def test_what_cannot_be_scored_is_422_with_the_reason(
    service: Service, body: dict[str, Any], detail: str
) -> None:
    response = await service.score(**body)
    assert response.status_code == 422, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert detail in response.json()["detail"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"text": "nyan", "prompt": "submarine"}, "topic 'submarine' is none of"),
        ({"text": "submarine"}, "task writing makes no trajectory of this"),
        ({"text": "   "}, "no tokens"),
        ({"trajectory": base64.b64encode(b"\xff\xff").decode()}, "not a sao.v1.Trajectory"),
        ({"trajectory": base64.b64encode(b"\x0a\x01x").decode()}, "no action token"),
    ],
    ids=str,
)
async def test_what_is_no_trajectory_is_invalid(service: Service, body: dict[str, Any], reason: str) -> None:
    answer = (await service.score(**body)).json()
    assert answer["trajectory_id"] is None
    assert answer["outcome"]["kind"] == "invalid"
    assert reason in answer["outcome"]["reason"]


async def test_without_a_preference_it_is_404_unless_one_is_sent_along(tmp_path: Path) -> None:
    service = Service(tmp_path)
    assert (await service.score(text=TEXT)).status_code == 404
    assert (await service.score(text=TEXT, preference=FUNNY.model_dump())).status_code == 200


async def test_a_wrong_token_is_401_and_a_body_without_end_413(service: Service) -> None:
    async with service.client() as client:
        for call in (client.get("/v1/components", headers={"Authorization": "Bearer x"}),):
            assert (await call).status_code == 401
        wrong = await client.post("/v1/score", json={"text": "a"}, headers={"Authorization": "Bearer x"})
        assert wrong.status_code == 401
        assert (await client.post("/v1/score", content=b" " * (MAX_BODY_BYTES + 1))).status_code == 413


async def test_a_store_that_does_not_answer_is_503(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> None:
        msg = "no answer"
        raise StreamUnavailableError(msg)

    monkeypatch.setattr(service.streams, "payload", away)
    assert (await service.score(trajectory_id="x")).status_code == 503


async def test_more_than_a_few_at_a_time_are_told_to_wait(service: Service) -> None:
    service.held = asyncio.Event()
    asked = [asyncio.ensure_future(service.score(text=TEXT, preference=FUNNY.model_dump())) for _ in range(AT_A_TIME)]
    await until(lambda: service.asked == AT_A_TIME, "the judge to be asked")
    refused = await service.score(text=TEXT)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    service.held.set()
    assert {response.status_code for response in await asyncio.gather(*asked)} == {200}
    assert (await service.score(text=TEXT)).status_code == 200


async def test_scoring_here_is_not_counted_as_the_runs(service: Service) -> None:
    before = [metrics.VALUE._count.get(), metrics.OUTCOMES.labels("scored")._value.get()]
    await service.score(text=TEXT, prompt="moon")
    assert [metrics.VALUE._count.get(), metrics.OUTCOMES.labels("scored")._value.get()] == before


async def test_the_statuses_are_in_the_schema(service: Service) -> None:
    async with service.client() as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert set(paths["/v1/score"]["post"]["responses"]) == {"200", "400", "401", "404", "413", "422", "429", "503"}
    assert set(paths["/v1/components"]["get"]["responses"]) >= {"200", "401"}
    schema = paths["/v1/score"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert [shape["required"] for shape in schema["oneOf"]] == [["text"], ["trajectory"], ["trajectory_id"]]
    assert set(schema["oneOf"][0]["properties"]) == {"text", "prompt", "task_payload", "preference"}


async def test_clients_that_never_send_their_body_give_their_places_back(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sao.problems.BODY_WITHIN_S", 0.05)

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with service.client() as client, asyncio.timeout(10):
        slow = await asyncio.gather(*(client.post("/v1/score", content=endless()) for _ in range(AT_A_TIME)))
    assert [answer.status_code for answer in slow] == [400] * AT_A_TIME
    assert "did not arrive whole within 0.05 s" in slow[0].json()["detail"]
    assert (await service.score(text=TEXT, prompt="moon")).status_code == 200
