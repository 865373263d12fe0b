"""History, rollback, hold, schedule, rate limit and bounds over REST."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from sao.board.base import TrainerFacts, TrainerState
from sao.board.memory import MemoryBoard
from sao.config import ConfigError
from sao.config.schema import PreferenceBounds
from sao.preference_changes import MAX_SCHEDULED
from services.reward.preferences.folder import Keeper, PreferenceFolder
from services.reward.preferences.routes import ensure_preference
from tests.support.reward_app import wired
from tests.unit.services.reward.preferences.test_folder import lines
from tests.unit.services.reward.preferences.test_routes import CLASSICAL, CUTE, TASK, URL, problem

WHO = {"author": "Ann", "reason": "because"}


class Run:
    """One board and folder, and a reward service over them for each client that is asked for."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.now = 1000.0
        self.board = MemoryBoard(clock=lambda: self.now)
        self.settings = settings
        self.keeper = self.new_keeper()

    def new_keeper(self) -> Keeper:
        return Keeper(
            self.board, PreferenceFolder(self.folder), min_seconds=self.settings.get("preference_min_seconds", 0.0)
        )

    def client(self) -> httpx.AsyncClient:
        app = wired(TASK, self.folder, board=self.board, settings=self.settings).app
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://reward")

    async def trained(self, update: int) -> None:
        """The trainer has made this update."""
        epoch = await self.board.new_trainer_epoch()
        await self.board.write_trainer(
            TrainerFacts(epoch=epoch, update=update, version="v1", consumed=1, state=TrainerState.TRAINING)
        )


@pytest.fixture
async def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
    await ensure_preference(made.board, CUTE, TASK)
    return made


def body_of(document: Any = CLASSICAL, **when: Any) -> dict[str, Any]:
    return {"document": document.model_dump(mode="json"), **when}


async def test_history_says_who_when_and_why_page_by_page(run: Run) -> None:
    async with run.client() as client:
        await client.put(URL, content=CLASSICAL.model_dump_json(), params=WHO)
        first = (await client.get(f"{URL}/history", params={"limit": 1})).json()["preferences"]
        assert [(one["version"], one["author"], one["reason"], one["origin"]) for one in first] == [
            (2, "Ann", "because", "put")
        ]
        assert first[0]["stored_s"] == run.now
        assert first[0]["client"] == "127.0.0.1"
        rest = (await client.get(f"{URL}/history", params={"before": 2})).json()["preferences"]
        assert [(one["version"], one["origin"]) for one in rest] == [(1, "initial")]
        for query in ({"limit": 0}, {"limit": 201}, {"before": 0}, {"before": "x"}):
            problem(await client.get(f"{URL}/history", params=query), 422)


async def test_a_rollback_repeats_an_older_version_as_the_next_one(run: Run) -> None:
    async with run.client() as client:
        await client.put(URL, content=CLASSICAL.model_dump_json())
        answer = await client.post(f"{URL}/1:rollback", params=WHO, headers={"If-Match": '"2"'})
        assert answer.headers["etag"] == '"3"'
        body = answer.json()
        assert (body["version"], body["origin"], body["restores"], body["author"]) == (3, "rollback", 1, "Ann")
        assert body["document"] == (await client.get(f"{URL}/1")).json()["document"]
        assert (await client.get(URL)).json() == body
        problem(await client.post(f"{URL}/1:rollback", headers={"If-Match": '"2"'}), 412)
        problem(await client.post(f"{URL}/9:rollback"), 404)
    assert (lines(run.folder)[-1]["what"], lines(run.folder)[-1]["restores"]) == ("rollback", 1)


async def test_while_held_every_change_is_refused_on_every_replica_and_scheduled_ones_wait(run: Run) -> None:
    async with run.client() as client, run.client() as other:
        assert (await client.get(f"{URL}/hold")).json()["held"] is False
        await client.post(f"{URL}/schedule", json=body_of(at_s=time.time()))
        held = (await client.post(f"{URL}:hold", params=WHO)).json()
        assert (held["held"], held["author"], held["since_s"]) == (True, "Ann", run.now)
        assert (await other.get(f"{URL}/hold")).json() == held
        run.now = time.time() + 10
        for refused in (
            await other.put(URL, content=CLASSICAL.model_dump_json()),
            await other.post(f"{URL}/1:rollback"),
            await other.post(f"{URL}/schedule", json=body_of(at_update=1)),
        ):
            found = problem(refused, 423)
            assert "held by Ann: because" in found["detail"]
            assert found["hold"] == held
        await run.keeper.apply()
        assert (await client.get(URL)).headers["etag"] == '"1"'
        assert (await other.post(f"{URL}:resume")).json()["held"] is False
        assert (await other.post(f"{URL}:resume")).json()["held"] is False
        await run.keeper.apply()
        assert (await client.get(URL)).headers["etag"] == '"2"'
    assert [line["what"] for line in lines(run.folder)] == ["initial", "schedule", "hold", "resume", "apply"]


async def test_a_switch_is_scheduled_seen_and_takes_effect_at_its_update(run: Run) -> None:
    async with run.client() as client:
        answer = await client.post(
            f"{URL}/schedule", json=body_of(at_update=5), params=WHO, headers={"If-Match": '"1"'}
        )
        assert answer.status_code == 201
        waits = answer.json()
        assert (waits["id"], waits["at_update"], waits["if_version"], waits["author"]) == (2, 5, 1, "Ann")
        assert (await client.get(f"{URL}/schedule")).json() == {"scheduled": [waits]}
        await run.trained(4)
        await run.keeper.apply()
        assert (await client.get(URL)).headers["etag"] == '"1"'
        await run.trained(5)
        await run.keeper.apply()
        current = (await client.get(URL)).json()
        assert (current["version"], current["origin"], current["reason"]) == (2, "schedule", "because")
        assert (await client.get(f"{URL}/schedule")).json() == {"scheduled": []}


async def test_a_switch_is_cancelled_once(run: Run) -> None:
    async with run.client() as client:
        waits = (await client.post(f"{URL}/schedule", json=body_of(at_update=5))).json()
        assert (await client.delete(f"{URL}/schedule/{waits['id']}", params=WHO)).status_code == 204
        assert "no switch 2 waits" in problem(await client.delete(f"{URL}/schedule/2"), 404)["detail"]
        for wrong in ("0", "x", "1e3"):
            problem(await client.delete(f"{URL}/schedule/{wrong}"), 422)
        assert (await client.get(f"{URL}/schedule")).json() == {"scheduled": []}
    assert (lines(run.folder)[-1]["what"], lines(run.folder)[-1]["author"]) == ("cancel", "Ann")


@pytest.mark.parametrize(
    ("when", "told"),
    [
        ({}, "exactly one"),
        ({"at_s": 1.0, "at_update": 1}, "exactly one"),
        ({"at_s": 5.0}, "Unix seconds"),
        ({"at_s": 1.8e12}, "Unix seconds"),
        ({"at_update": -1}, "at_update"),
        ({"at_update": "1"}, "at_update"),
        ({"at": 1}, "/at"),
    ],
)
async def test_a_switch_without_one_sensible_moment_is_refused(run: Run, when: dict[str, Any], told: str) -> None:
    async with run.client() as client:
        assert told in problem(await client.post(f"{URL}/schedule", json=body_of(**when)), 422)["detail"]
        assert len(await run.board.preference_changes(0)) == 1


async def test_a_switch_is_checked_when_it_is_asked_for(run: Run) -> None:
    async with run.client() as client:
        unknown = body_of(CUTE.model_copy(update={"weights": {"wit": 1.0}}), at_update=1)
        assert problem(await client.post(f"{URL}/schedule", json=unknown), 422)["unknown_components"] == ["wit"]
        conflict = await client.post(f"{URL}/schedule", json=body_of(at_update=1), headers={"If-Match": '"7"'})
        problem(conflict, 412)
        for _ in range(MAX_SCHEDULED):
            assert (await client.post(f"{URL}/schedule", json=body_of(at_update=9))).status_code == 201
        assert (
            "switches wait" in problem(await client.post(f"{URL}/schedule", json=body_of(at_update=9)), 409)["detail"]
        )


async def test_versions_come_no_faster_than_the_limit_on_all_replicas_together(tmp_path: Path) -> None:
    run = Run(tmp_path, preference_min_seconds=60.0)
    await ensure_preference(run.board, CUTE, TASK)
    async with run.client() as client, run.client() as other:
        assert (await client.put(URL, content=CLASSICAL.model_dump_json())).status_code == 200
        run.now += 18.5
        refused = await other.put(URL, content=CUTE.model_dump_json())
        assert "reward.preference_min_seconds" in problem(refused, 429)["detail"]
        assert refused.headers["retry-after"] == "42"
        problem(await other.post(f"{URL}/1:rollback"), 429)
        run.now += 41.5
        assert (await other.put(URL, content=CUTE.model_dump_json())).json()["version"] == 3


@pytest.mark.parametrize(
    ("change", "bound", "told"),
    [
        ({"weights": {"quality": -5.5}}, "reward.bounds.weight", "weights.quality is -5.5"),
        ({"offset": 3.0}, "reward.bounds.offset", "offset is 3"),
        ({"high": 2.5}, "reward.bounds.reward", "high is 2.5, reward.bounds.reward allows -2 to 2"),
        ({"low": -2.5}, "reward.bounds.reward", "low is -2.5"),
    ],
)
async def test_a_preference_beyond_the_bounds_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], bound: str, told: str
) -> None:
    bounds = PreferenceBounds(weight=5.0, offset=2.0, reward=2.0)
    run = Run(tmp_path, bounds=bounds)
    wild = CUTE.model_copy(update=change)
    with pytest.raises(ConfigError, match="preference"):
        await ensure_preference(run.board, wild, TASK, bounds)
    await ensure_preference(run.board, CUTE, TASK, bounds)
    await run.board.put_preference(wild)  # from before the bounds were drawn
    async with run.client() as client:
        for refused in (
            await client.put(URL, content=wild.model_dump_json()),
            await client.post(f"{URL}:dry-run", content=wild.model_dump_json()),
            await client.post(f"{URL}/schedule", json=body_of(wild, at_update=1)),
            await client.post(f"{URL}/2:rollback"),
        ):
            found = problem(refused, 422)
            assert found["bound"] == bound
            assert told in found["detail"]


@pytest.mark.parametrize("query", [{"author": "x" * 65}, {"reason": "x" * 501}])
async def test_who_and_why_are_bounded(run: Run, query: dict[str, str]) -> None:
    async with run.client() as client:
        for answer in (
            await client.put(URL, content=CLASSICAL.model_dump_json(), params=query),
            await client.post(f"{URL}/1:rollback", params=query),
            await client.post(f"{URL}:hold", params=query),
            await client.delete(f"{URL}/schedule/1", params=query),
        ):
            problem(answer, 422)
        assert len(await run.board.preference_changes(0)) == 1


async def test_every_route_wants_the_token(run: Run) -> None:
    app = wired(TASK, run.folder, board=run.board, token=SecretStr("t")).app
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://reward") as client:
        for method, path in (
            ("POST", ":hold"),
            ("POST", ":resume"),
            ("POST", ":dry-run"),
            ("POST", "/1:rollback"),
            ("POST", "/schedule"),
            ("DELETE", "/schedule/1"),
            ("GET", "/history"),
            ("GET", "/hold"),
            ("GET", "/schedule"),
        ):
            problem(await client.request(method, f"{URL}{path}"), 401)
