"""The JSON that the console reads, on in-memory stores and a folder of a made-up run."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from sao.archive import Archive
from sao.board.base import TrainerFacts, TrainerState, VersionRecord
from sao.board.memory import MemoryBoard
from sao.config import RunConfig, load_run_config
from sao.outcome import OUTCOME, Scored
from sao.run_history import MAX_POINTS
from sao.streams.base import StreamName, StreamUnavailableError
from sao.streams.memory import MemoryStreams
from sao.telemetry.health import Health
from services.reward.alarm_watch import AlarmWatch
from services.reward.alarms import Alarms
from services.reward.app import wire
from services.reward.console.pages import POLICY
from services.reward.console.routes import ConsoleRoutes
from services.reward.preferences.routes import ensure_preference
from tests.support.console_run import TASK, TOKENIZER, fill_folder, fill_stores, written
from tests.support.update_rows import trained_row, update_row

UPDATES = 12
READ = [
    "/v1/run",
    "/v1/curves",
    "/v1/adaptation",
    "/v1/engines",
    "/v1/versions",
    "/v1/dead-letters",
    "/v1/trajectories",
]


class World:
    """One run's stores, folder and service."""

    def __init__(self, folder: Path, token: str | None = None) -> None:
        sets = ["run.name=made-up", f'run.dir="{folder}"', "task.name=writing", "run.updates=450"]
        self.config: RunConfig = load_run_config(None, [*sets, *([f"auth.token={token}"] if token else [])], env={})
        self.folder = folder
        self.board: Any = MemoryBoard(claimed=True)
        self.streams: Any = MemoryStreams(self.board)

    def app(self) -> FastAPI:
        return wire(self.config, TASK, TOKENIZER, board=self.board, streams=self.streams, health=Health(60.0)).app

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app()), base_url="http://reward")

    async def append(self, ordinal: int) -> str:
        made = written(random.Random(ordinal), "cute", 0.5)
        fields = {"task": "writing", "ordinal": str(ordinal)}
        await self.streams.append(made.id, made.message.SerializeToString(), ordinal=ordinal, sample=0, fields=fields)
        return made.id

    async def score(self, value: float = 0.5) -> str:
        await self.streams.open_consumer(StreamName.TRAJECTORIES, "r")
        (delivery,) = await self.streams.read(StreamName.TRAJECTORIES, "r", count=1, block_ms=0)
        outcome = Scored(components={"quality": 1.0}, value=value, scored_under=2, scoring_started_s=1.0)
        fields = {**delivery.fields, "outcome": OUTCOME.dump_json(outcome).decode()}
        assert await self.streams.move(delivery, "r", StreamName.SCORED, fields)
        trajectory_id: str = delivery.trajectory_id
        return trajectory_id


@pytest.fixture
async def world(tmp_path: Path) -> World:
    """A run of 12 updates that was switched after the eighth, with facts in its stores."""
    made = World(tmp_path)
    fill_folder(tmp_path, UPDATES, switched_at=8, archived=4)
    await fill_stores(made.config, made.board, made.streams, UPDATES + 20)
    return made


@pytest.fixture
async def client(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.client() as made:
        yield made


async def got(client: httpx.AsyncClient, path: str) -> Any:
    answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_run_says_how_it_stands(client: httpx.AsyncClient, world: World) -> None:
    run = await got(client, "/v1/run")

    assert (run["name"], run["task"], run["algorithm"], run["state"]) == ("made-up", "writing", "sao", "training")
    assert (run["update"], run["updates"], run["trajectories"]) == (UPDATES, 450, 4 * UPDATES)
    assert run["version"] == f"v{UPDATES + 20:08d}"
    assert run["lag"] == 6.0
    assert run["rejected"] == pytest.approx(0.09)
    assert (run["waiting_for_scoring"], run["waiting_for_training"]) == (1, 0)
    assert set(run["components"]) == TASK.components
    assert run["caught_up"]
    assert run["stall"] == ""


@pytest.mark.parametrize("path", READ)
async def test_a_fresh_run_without_files_is_answered(tmp_path: Path, path: str) -> None:
    async with World(tmp_path / "none").client() as client:
        await got(client, path)
    assert not (tmp_path / "none").exists()


async def test_a_fresh_run_claims_nothing(tmp_path: Path) -> None:
    async with World(tmp_path).client() as client:
        run = await got(client, "/v1/run")
        assert (run["state"], run["version"], run["reward"], run["last_update_s"]) == (None, None, None, None)
        curves = await got(client, "/v1/curves")
        assert (curves["points"], curves["latest"], curves["switches"]) == ([], None, [])


@pytest.mark.parametrize(
    ("scoring", "training", "words"), [(3, 0, "logs/reward.log"), (0, 2, "logs/trainer.log"), (0, 0, "logs/worker.log")]
)
async def test_a_stall_says_where_to_look(tmp_path: Path, scoring: int, training: int, words: str) -> None:
    world = World(tmp_path)
    long_ago = update_row(3, [trained_row(1, 0.5, consumed_s=time.time() - 300)])
    (tmp_path / "updates.jsonl").write_text(long_ago.model_dump_json() + "\n")
    epoch = await world.board.new_trainer_epoch()
    facts = TrainerFacts(epoch=epoch, update=3, version="", consumed=1, state=TrainerState.TRAINING)
    await world.board.write_trainer(facts)
    for ordinal in range(scoring + training):
        await world.append(ordinal)
    for _ in range(training):
        await world.score()
    async with world.client() as client:
        stall = (await got(client, "/v1/run"))["stall"]
        assert stall.startswith("no update for 5 min")
        assert words in stall
        await world.board.write_trainer(facts.model_copy(update={"state": TrainerState.FINISHED}))
        assert (await got(client, "/v1/run"))["stall"] == ""


async def test_curves_are_continued_after_what_a_reader_has(client: httpx.AsyncClient, world: World) -> None:
    whole = await got(client, "/v1/curves")
    rest = await got(client, "/v1/curves?after=40")

    assert [point["trajectory"] for point in whole["points"]] == list(range(1, 4 * UPDATES + 1))
    assert rest["points"] == whole["points"][40:]
    assert [(one["from_version"], one["to_version"], one["trajectory"]) for one in whole["switches"]] == [(1, 2, 33)]
    assert whole["latest"] == whole["points"][-1]


async def test_adaptation_is_told_for_each_preference_but_the_first(client: httpx.AsyncClient, world: World) -> None:
    assert await got(client, "/v1/adaptation") == {"adaptations": []}
    await ensure_preference(world.board, None, TASK)
    assert await got(client, "/v1/adaptation") == {"adaptations": []}
    for name in ("classical", "chuunibyou"):
        await world.board.put_preference(TASK.preferences[name])

    newest, second = (await got(client, "/v1/adaptation"))["adaptations"]

    assert (newest["version"], newest["name"], newest["first_trained_s"]) == (3, "chuunibyou", None)
    assert (second["version"], second["first_trained_s"] is not None, second["first_served_s"]) == (2, True, None)
    assert await got(client, "/v1/adaptation?before=3") == {"adaptations": [second]}


async def test_an_alarm_that_scoring_raised_is_shown(world: World) -> None:
    alarms = AlarmWatch(Alarms(world.config.reward.alarms.model_copy(update={"window": 50})))
    preference = await ensure_preference(world.board, None, TASK)
    for correct in [0.1] * 200 + [0.9] * 50:
        alarms.observe({"style_cute": correct, "quality": 1.0 - correct}, preference)
    routes = ConsoleRoutes(world.config, world.board, world.streams, TOKENIZER, alarms=alarms.active)
    assert [(one.rising, one.collapsing) for one in (await routes.run()).alarms] == [("style_cute", "quality")]


async def test_engines_and_versions_say_who_serves_what(client: httpx.AsyncClient) -> None:
    engines = (await got(client, "/v1/engines"))["engines"]
    states = {one["engine_id"]: one["state"] for one in engines}
    assert states == {"engine-0": "serving", "engine-1": "quarantined"}
    versions = await got(client, "/v1/versions?limit=12")
    assert (len(versions["versions"]), versions["total"]) == (12, 21)
    assert [one["update"] for one in versions["versions"]] == list(range(32, 20, -1))
    assert [one["engines"] for one in versions["versions"] if one["engines"]] == [["engine-0"], ["engine-1"]]


async def test_many_viewers_read_the_board_once_a_second(tmp_path: Path) -> None:
    class Counted(MemoryBoard):
        asked = 0

        async def versions(self) -> dict[str, VersionRecord]:
            self.asked += 1
            return await super().versions()

    world = World(tmp_path)
    world.board = Counted()
    async with world.client() as client:
        await asyncio.gather(*(got(client, "/v1/versions") for _ in range(20)))
    assert world.board.asked <= 2  # a busy machine may take more than a second over it


async def test_dead_letters_come_in_pages_with_their_reasons(tmp_path: Path) -> None:
    world = World(tmp_path)
    ids = []
    for ordinal in range(5):
        ids.append(await world.append(ordinal))
        await world.streams.open_consumer(StreamName.TRAJECTORIES, "r")
        (delivery,) = await world.streams.read(StreamName.TRAJECTORIES, "r", count=1, block_ms=0)
        await world.streams.bury(delivery, "r", f"timeout: number {ordinal} " + "x" * 3000)
    async with world.client() as client:
        first = await got(client, "/v1/dead-letters?limit=3")
        assert [one["trajectory_id"] for one in first["dead_letters"]] == ids[:1:-1]
        assert {one["kind"] for one in first["dead_letters"]} == {"timeout"}
        assert {len(one["reason"]) for one in first["dead_letters"]} == {2000}
        rest = await got(client, f"/v1/dead-letters?limit=3&before={first['next']}")
        assert [one["trajectory_id"] for one in rest["dead_letters"]] == ids[1::-1]
        assert rest["next"] is None
        assert (await got(client, "/v1/dead-letters?before=0-0"))["dead_letters"] == []
        inspected = await got(client, f"/v1/trajectories/{ids[2]}")
        assert inspected["summary"]["state"] == "dead"
        assert "number 2" in inspected["note"]


async def test_what_waits_comes_before_what_was_trained(client: httpx.AsyncClient, world: World) -> None:
    scored = [await world.score(), await world.append(950)][1:]
    page = await got(client, "/v1/trajectories?limit=5")

    states = [one["state"] for one in page["trajectories"]]
    assert states == ["waiting", "scored", *["trained"] * 5]
    assert page["trajectories"][0]["id"] == scored[0]
    assert page["trajectories"][1]["reward"] == 0.5
    older = await got(client, f"/v1/trajectories?limit=5&before={page['next']}")
    assert [one["state"] for one in older["trajectories"]] == ["trained"] * 5
    assert older["trajectories"][0]["ordinal"] == page["trajectories"][-1]["ordinal"] - 1


async def test_what_was_trained_and_is_not_settled_is_listed_once(tmp_path: Path) -> None:
    """The trainer settles at its checkpoints; until then an entry is on its stream and in the rows."""
    world = World(tmp_path)
    first, second = await world.append(0), await world.append(1)
    await world.score()
    row = update_row(1, [trained_row(0, 0.5, id_=first)])
    (tmp_path / "updates.jsonl").write_text(row.model_dump_json() + "\n")
    async with world.client() as client:
        listed = (await got(client, "/v1/trajectories"))["trajectories"]
    assert [(one["id"], one["state"]) for one in listed] == [(second, "waiting"), (first, "trained")]


async def test_one_trajectory_is_inspected_wherever_it_is(client: httpx.AsyncClient, world: World) -> None:
    trained = Archive(world.folder / "archive").read(UPDATES).trajectories[0]
    view = await got(client, f"/v1/trajectories/{trained.trajectory.id}")
    assert view["summary"]["reward"] == trained.reward
    assert [token["advantage"] for token in view["segments"][1]["tokens"]] == list(trained.advantages)
    window = await got(client, f"/v1/trajectories/{trained.trajectory.id}?first=4&count=2")
    assert [token["position"] for segment in window["segments"] for token in segment["tokens"]] == [4, 5]

    scored = await world.score(0.75)
    waiting = await got(client, f"/v1/trajectories/{scored}")
    assert (waiting["summary"]["state"], waiting["summary"]["reward"]) == ("scored", 0.75)
    assert waiting["segments"][1]["tokens"][0]["advantage"] is None


def problem(answer: httpx.Response, status: int, words: str) -> None:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    assert words in answer.json()["detail"]


async def test_what_nobody_knows_is_404_and_nonsense_422(client: httpx.AsyncClient, world: World) -> None:
    nobody = "01a22b0f-6c7e-74f6-9ab9-7b6361bd3449"
    problem(await client.get(f"/v1/trajectories/{nobody}"), 404, "neither in this run's folder")
    for path in (
        "/v1/trajectories/../etc",
        "/v1/trajectories/x",
        f"/v1/trajectories/{nobody}?count=0",
        f"/v1/trajectories/{nobody}?count=4097",
        "/v1/trajectories?before=7",
        "/v1/trajectories?before=7.0",
        "/v1/trajectories?limit=201",
        "/v1/curves?after=-1",
        "/v1/curves?after=x",
        "/v1/dead-letters?before=x",
        "/v1/dead-letters?limit=0",
        "/v1/versions?limit=0",
    ):
        assert (await client.get(path)).status_code in {422, 404}, path


async def test_damage_in_the_folder_is_an_answer_not_a_crash(world: World, client: httpx.AsyncClient) -> None:
    archive = Archive(world.folder / "archive")
    trained = archive.read(UPDATES).trajectories[0]
    (world.folder / "archive" / archive.steps()[-1].file_name).write_bytes(b"\xff\xff")
    problem(await client.get(f"/v1/trajectories/{trained.trajectory.id}"), 503, "is damaged")
    with (world.folder / "updates.jsonl").open("a") as file:
        file.write('{"no":"row"}\n')
    problem(await client.get("/v1/curves"), 503, "no row")
    problem(await client.get("/v1/trajectories"), 503, "no row")


async def test_a_torn_last_line_is_left_for_later(world: World, client: httpx.AsyncClient) -> None:
    with (world.folder / "updates.jsonl").open("a") as file:
        file.write('{"update":13,"cri')
    assert (await got(client, "/v1/run"))["update"] == UPDATES
    assert len((await got(client, "/v1/trajectories?limit=100"))["trajectories"]) == 1 + 4 * UPDATES


async def test_a_store_that_is_away_is_503(world: World) -> None:
    class Away(MemoryBoard):
        async def trainer(self) -> TrainerFacts | None:
            msg = "no answer within 5 s"
            raise StreamUnavailableError(msg)

    world.board = Away()
    async with world.client() as client:
        problem(await client.get("/v1/run"), 503, "store does not answer")
        await got(client, "/v1/curves")


@pytest.mark.parametrize("path", [*READ, "/v1/trajectories/01a22b0f-6c7e-74f6-9ab9-7b6361bd3449"])
async def test_everything_of_the_run_needs_its_token(tmp_path: Path, path: str) -> None:
    async with World(tmp_path, token="s3cret").client() as client:
        problem(await client.get(path), 401, "Bearer")
        answer = await client.get(path, headers={"Authorization": "Bearer s3cret"})
        assert answer.status_code in {200, 404}


async def test_the_page_needs_no_token_and_lets_nothing_else_in(tmp_path: Path) -> None:
    async with World(tmp_path, token="s3cret").client() as client:
        page = await client.get("/console")
        assert page.status_code == 200
        assert page.headers["content-security-policy"] == POLICY
        assert "unsafe" not in POLICY
        assert "default-src 'none'" in POLICY
        assert "<script>" not in page.text
        assert "onclick" not in page.text
        for name, kind in (("app.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")):
            answer = await client.get(f"/console/{name}")
            assert answer.headers["content-type"].startswith(kind)
            assert answer.headers["x-content-type-options"] == "nosniff"
            etag = answer.headers["etag"]
            assert (await client.get(f"/console/{name}", headers={"If-None-Match": etag})).status_code == 304
        for name in ("nothing.js", "..%2f__init__.py", "__init__.py"):
            assert (await client.get(f"/console/{name}")).status_code == 404


async def test_every_route_documents_its_answers(tmp_path: Path) -> None:
    schema = World(tmp_path).app().openapi()
    for path in (*READ, "/v1/trajectories/{trajectory_id}"):
        answers = schema["paths"][path]["get"]["responses"]
        assert {"200", "401", "503"} <= set(answers), path
        assert all("application/problem+json" in one["content"] for code, one in answers.items() if code != "200"), path
        assert "$ref" in answers["200"]["content"]["application/json"]["schema"], path


async def test_a_long_run_is_read_in_the_background_and_answered_within_bounds(tmp_path: Path) -> None:
    """10,000 updates; the loop that scores must not wait for their reading."""
    world = World(tmp_path)
    lines = []
    for preference in range(1, 6):
        ones = [trained_row(at, 0.5, scored_under=preference) for at in range(4)]
        line = update_row(-1, ones).model_dump_json() + "\n"
        lines += [
            line.replace('"update":-1', f'"update":{update}')
            for update in range(2000 * preference - 2000, 2000 * preference)
        ]
    (tmp_path / "updates.jsonl").write_text("".join(lines))
    epoch = await world.board.new_trainer_epoch()
    training = TrainerFacts(epoch=epoch, update=9999, version="", consumed=40_000, state=TrainerState.TRAINING)
    await world.board.write_trainer(training)
    holds = []

    async def watch() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            holds.append(time.thread_time() - before)

    async with world.client() as client:
        watching = asyncio.ensure_future(watch())
        caught_up = False
        while not caught_up:
            run = await got(client, "/v1/run")
            assert (run["stall"] == "") != run["caught_up"], "what is read so far tells no time"
            answer = await client.get("/v1/curves")
            caught_up = answer.json()["caught_up"]
        watching.cancel()
    curves = answer.json()
    assert len(curves["points"]) <= MAX_POINTS
    assert len(answer.content) < 200_000
    assert curves["latest"]["trajectory"] == 40_000
    assert len(curves["switches"]) == 4
    # The time that the loop's own thread computed between two turns, which no busy machine lengthens.
    assert max(holds, default=1.0) < 0.05
