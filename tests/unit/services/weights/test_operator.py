"""An operator rolls back, holds and resumes over REST; what was asked outlives the service and the store."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY
from pydantic import SecretStr
from structlog.testing import capture_logs

from sao.board.base import EngineState
from sao.streams.base import StreamUnavailableError
from sao.telemetry.health import Health
from sao.weights.control import CONTROL_FILE
from sao.weights.manifest import Manifest
from services.weights import app, routes
from services.weights.engines.memory import checkpoint_logprobs
from services.weights.guards import Doubt
from tests.support.versions import (
    announce,
    floats,
    publish_checkpoint,
    write_safetensors,
    write_toy_checkpoint,
)
from tests.unit.services.weights.world import World

URL = "/v1/weights"
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def client_of(world: World, token: str | None = None) -> httpx.AsyncClient:
    secret = SecretStr(token) if token is not None else None
    transport = httpx.ASGITransport(app=app.build_app(world.fleet, world.keepers, Health(60), secret))
    return httpx.AsyncClient(transport=transport, base_url="http://weights")


@pytest.fixture
async def world(tmp_path: Path) -> World:
    made = World(tmp_path, engines=2)
    await made.restore()
    return made


@pytest.fixture
async def client(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(world) as made:
        yield made


async def served(world: World, *seeds: int) -> list[Manifest]:
    """Publish these one after the other, each served before the next."""
    found = []
    for seed in seeds:
        found.append(await world.publish(seed))
        await world.settle(1.5)
    return found


async def asked(client: httpx.AsyncClient, path: str, reason: str = "") -> dict[str, Any]:
    response = await client.post(path, json={"reason": reason} if reason else None)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def problem(client: httpx.AsyncClient, path: str, status: int, **sent: Any) -> str:
    """The detail of the problem document that a POST is answered with."""
    response = await client.post(path, **sent)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert (body["status"], body["instance"]) == (status, path)
    detail: str = body["detail"]
    return detail


async def serving(world: World) -> set[str]:
    """What the engines serve."""
    await world.settle(1.5)
    facts = [await world.facts(index) for index in range(len(world.engines))]
    assert all(one.state is EngineState.SERVING for one in facts), facts
    return {one.version for one in facts}


def gauge(by: str) -> float | None:
    return REGISTRY.get_sample_value("sao_weights_publishing_held", {"by": by})


def restarted(world: World) -> httpx.AsyncClient:
    """A new process of the service, and a client of it."""
    world.start()
    return client_of(world)


async def test_an_older_version_comes_back_and_newer_ones_wait_until_resume(
    world: World, client: httpx.AsyncClient
) -> None:
    old, new = await served(world, 1, 2)
    answer = await asked(client, f"{URL}/{old.version}:activate", "style collapsed")
    assert answer["target"] == old.version
    assert await serving(world) == {old.version}
    newer = await world.publish(3)
    newest = await world.publish(4)
    assert await serving(world) == {old.version}
    publishing = (await client.get(URL)).json()["publishing"]
    assert publishing["held"] is True
    assert (publishing["by"], publishing["version"]) == ("activate", old.version)
    assert (publishing["reason"], publishing["client"]) == ("style collapsed", "127.0.0.1")
    states = {one["version"]: one["state"] for one in (await client.get(URL)).json()["versions"]}
    assert states == {
        old.version: "target",
        new.version: "waiting",
        newer.version: "waiting",
        newest.version: "waiting",
    }
    assert gauge("activate") == 1.0
    answer = await asked(client, f"{URL}:resume")
    assert (answer["target"], answer["publishing"]["held"]) == (newest.version, False)
    assert await serving(world) == {newest.version}
    assert gauge("activate") == 0.0


async def test_forward_is_as_good_as_back(world: World, client: httpx.AsyncClient) -> None:
    first, second, third = await served(world, 1, 2, 3)
    await asked(client, f"{URL}/{first.version}:activate")
    assert await serving(world) == {first.version}
    await asked(client, f"{URL}/{second.version}:activate")
    assert await serving(world) == {second.version}
    assert (await asked(client, f"{URL}:resume"))["target"] == third.version


async def test_an_activated_version_is_not_collected_and_an_abandoned_one_is(
    world: World, client: httpx.AsyncClient
) -> None:
    old, _ = await served(world, 1, 2)
    for engine in world.engines:
        engine.faults.unreachable = True  # so that nobody but the operator has a lease on it
    await asked(client, f"{URL}/{old.version}:activate")
    for seed in (3, 4, 5):
        await world.publish(seed)
    for holder in ("engine-0", "engine-1"):
        world.store.release(holder)
    await world.fleet.collect()
    assert old.version in world.store.names()
    await asked(client, f"{URL}:resume")
    await world.fleet.collect()
    assert old.version not in world.store.names()


async def test_a_rollback_survives_the_service_and_the_store(world: World, client: httpx.AsyncClient) -> None:
    old, _ = await served(world, 1, 2)
    await asked(client, f"{URL}/{old.version}:activate", "why")
    world.board.empty()
    async with restarted(world) as later:
        await world.restore()
        await world.board.new_trainer_epoch()
        newest = await world.publish(3)
        await announce(world.board, old)
        await announce(world.board, newest)
        await world.fleet.follow()
        assert await serving(world) == {old.version}
        publishing = (await later.get(URL)).json()["publishing"]
        assert (publishing["version"], publishing["reason"]) == (old.version, "why")
        assert gauge("activate") == 1.0
        assert (await asked(later, f"{URL}:resume"))["target"] == newest.version
    async with restarted(world):
        await world.restore()
        await world.fleet.follow()
        assert await serving(world) == {newest.version}
        assert "operator" not in world.store.leases()


async def test_a_held_target_is_replaced_by_what_was_proven_before_and_publishing_waits(
    world: World, client: httpx.AsyncClient
) -> None:
    old, bad = await served(world, 1, 2)
    answer = await asked(client, f"{URL}/{bad.version}:hold", "insults people")
    assert answer["target"] == old.version
    assert (answer["publishing"]["by"], answer["publishing"]["reason"]) == ("hold", f"{bad.version}: insults people")
    newer = await world.publish(3)
    assert await serving(world) == {old.version}
    assert (await asked(client, f"{URL}:resume"))["target"] == newer.version


async def test_a_held_version_is_skipped_for_ever_unless_it_is_activated(
    world: World, client: httpx.AsyncClient
) -> None:
    old, bad = await served(world, 1, 2)
    await asked(client, f"{URL}/{bad.version}:hold")
    assert (await asked(client, f"{URL}:resume"))["target"] == old.version
    world.start()
    await world.restore()
    await world.fleet.follow()
    assert await serving(world) == {old.version}
    async with client_of(world) as later:
        assert [one["state"] for one in (await later.get(URL)).json()["versions"]] == ["target", "held"]
        assert (await asked(later, f"{URL}/{bad.version}:activate"))["target"] == bad.version
        assert (await asked(later, f"{URL}:resume"))["target"] == bad.version
    assert await serving(world) == {bad.version}


async def test_who_falls_back_falls_back_to_no_held_version(world: World, client: httpx.AsyncClient) -> None:
    first, second, third = await served(world, 1, 2, 3)
    assert (await asked(client, f"{URL}/{third.version}:hold"))["target"] == second.version
    await serving(world)
    assert (await asked(client, f"{URL}/{second.version}:hold"))["target"] == first.version


async def test_what_was_being_looked_at_when_somebody_decided_does_not_overrule_them(
    world: World, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = await served(world, 1, 2)
    looking, go_on = asyncio.Event(), asyncio.Event()
    inspected = world.fleet.inspected

    async def slowly(version: str) -> Manifest:
        manifest = await inspected(version)
        if version != old.version:
            looking.set()
            await go_on.wait()
        return manifest

    monkeypatch.setattr(world.fleet, "inspected", slowly)
    publishing = asyncio.ensure_future(world.publish(3))
    await looking.wait()
    await asked(client, f"{URL}/{old.version}:activate")
    go_on.set()
    await publishing
    assert world.store.leases()["target"] == old.version
    assert await serving(world) == {old.version}


async def test_a_target_that_no_engine_could_prove_is_the_target_no_longer(world: World) -> None:
    (good,) = await served(world, 1)
    for engine in world.engines:
        engine.faults.ignore_load = True
    bad = await world.publish(2)
    await serving(world)
    assert bad.version in world.fleet.refused
    await world.fleet.follow()
    assert world.fleet.target == good


async def test_a_failed_attempt_leaves_the_earlier_one_in_force(world: World, client: httpx.AsyncClient) -> None:
    old, other, _ = await served(world, 1, 2, 3)
    await asked(client, f"{URL}/{old.version}:activate")
    damage(world, other)
    await problem(client, f"{URL}/{other.version}:activate", 409)
    assert world.store.leases()["operator"] == old.version
    assert await serving(world) == {old.version}


async def test_a_pinned_version_found_damaged_at_a_start_is_replaced_by_what_was_proven(
    world: World, client: httpx.AsyncClient
) -> None:
    old, new = await served(world, 1, 2)
    await asked(client, f"{URL}/{old.version}:activate")
    damage(world, old)
    async with restarted(world) as later:
        await world.restore()
        await world.fleet.follow()
        newest = await world.publish(3)
        assert await serving(world) == {new.version}
        assert (await later.get(URL)).json()["publishing"]["version"] == old.version
        assert (await asked(later, f"{URL}:resume"))["target"] == newest.version


async def test_a_run_from_before_there_were_guards_is_compared_with_what_was_proven(world: World) -> None:
    (good,) = await served(world, 1)
    (world.folder / CONTROL_FILE).unlink()
    world.start()  # and does not follow yet
    zeroed = publish_checkpoint(world.store, zeroed_checkpoint(world.folder, 2), checkpoint_logprobs, update=1)
    await announce(world.board, zeroed)
    await world.restore()
    await world.fleet.follow()
    assert await serving(world) == {good.version}


async def test_a_version_that_waits_is_held_without_a_round(world: World, client: httpx.AsyncClient) -> None:
    _, target, _ = await served(world, 1, 2, 3)
    await asked(client, f"{URL}/{target.version}:activate", "first")
    await serving(world)
    newest = await world.publish(4)
    loads = world.engines[0].calls.count("load")
    answer = await asked(client, f"{URL}/{newest.version}:hold")
    assert (answer["target"], answer["publishing"]["reason"]) == (target.version, "first")
    assert await serving(world) == {target.version}
    assert world.engines[0].calls.count("load") == loads


async def test_a_tensor_that_became_zero_waits_and_the_last_good_version_serves(
    world: World, client: httpx.AsyncClient
) -> None:
    (good,) = await served(world, 1)
    with capture_logs() as logs:
        zeroed = await world.publish_from(zeroed_checkpoint(world.folder, 2))
    assert await serving(world) == {good.version}
    (told,) = [entry for entry in logs if entry["event"] == "version held by a guard"]
    assert (told["log_level"], told["version"], told["guard"]) == ("error", zeroed.version, "zero_tensor")
    assert told["serving"] == good.version
    assert f"{HEAD} holds nothing but zeros" in told["detail"]
    assert gauge("zero_tensor") == 1.0
    view = (await client.get(URL)).json()
    assert (view["publishing"]["by"], view["publishing"]["version"]) == ("zero_tensor", zeroed.version)
    assert view["versions"][-1]["state"] == "held"
    assert view["versions"][-1]["refused"] is None
    next_good = await world.publish(3)
    assert await serving(world) == {next_good.version}
    assert gauge("zero_tensor") == 0.0
    assert (await client.get(URL)).json()["publishing"]["held"] is False


@pytest.mark.parametrize("how", ["resume", "activate"])
@pytest.mark.parametrize("restart", [False, True], ids=["", "after a restart"])
async def test_what_a_guard_holds_is_let_through_by_resume_or_activate(world: World, how: str, restart: bool) -> None:
    (good,) = await served(world, 1)
    zeroed = await world.publish_from(zeroed_checkpoint(world.folder, 2))
    if restart:
        world.start()
        await world.restore()
        await world.fleet.follow()
    assert await serving(world) == {good.version}
    async with client_of(world) as client:
        path = f"{URL}:resume" if how == "resume" else f"{URL}/{zeroed.version}:activate"
        assert (await asked(client, path))["target"] == zeroed.version
    assert await serving(world) == {zeroed.version}
    again = await world.publish_from(zeroed_checkpoint(world.folder, 3))
    assert await serving(world) == {again.version if how == "resume" else zeroed.version}, "zero since before"


async def test_a_canary_that_drifts_holds_the_version(tmp_path: Path) -> None:
    world = World(tmp_path, engines=2, drift_max=0.01)  # twins of other seeds differ by nats
    await world.restore()
    await served(world, 1)
    same = await world.publish(1)
    assert await serving(world) == {same.version}
    strange = await world.publish(2)
    assert await serving(world) == {same.version}
    assert gauge("canary_drift") == 1.0
    async with client_of(world) as client:
        held = (await client.get(URL)).json()["versions"][-1]["held"]
        assert f"from those of {same.version} on average, allowed 0.01 (weights.canary_drift_max)" in held["reason"]
        assert (await asked(client, f"{URL}:resume"))["target"] == strange.version
    assert await serving(world) == {strange.version}


async def test_a_disk_that_refuses_changes_nothing_for_an_operator_and_still_holds_for_a_guard(
    world: World, client: httpx.AsyncClient
) -> None:
    old, new = await served(world, 1, 2)
    (world.folder / f".{CONTROL_FILE}.tmp").mkdir()
    assert "does not answer" in await problem(client, f"{URL}/{old.version}:activate", 503)
    assert "operator" not in world.store.leases()
    assert await serving(world) == {new.version}
    await world.publish_from(zeroed_checkpoint(world.folder, 3))
    assert await serving(world) == {new.version}
    assert gauge("zero_tensor") == 1.0


async def test_a_version_nobody_has_is_404_and_one_that_cannot_serve_is_409(
    world: World, client: httpx.AsyncClient
) -> None:
    (good,) = await served(world, 1)
    for name in ("v00000099", "nonsense", "..%2Fv00000001"):
        for verb in ("activate", "hold"):
            response = await client.post(f"{URL}/{name}:{verb}")
            assert response.status_code == 404
            assert response.headers["content-type"] == "application/problem+json"
    half = write_toy_checkpoint(world.folder / "half", 2)
    write_safetensors(half / "model.safetensors", {HEAD: floats(1.0, 2.0, 3.0)})
    refused = await world.publish_from(half)
    assert "is refused" in await problem(client, f"{URL}/{refused.version}:activate", 409)
    assert "is refused" in await problem(client, f"{URL}/{refused.version}:hold", 409)
    assert f"no proven version but {good.version}" in await problem(client, f"{URL}/{good.version}:hold", 409)
    assert (await client.get(URL)).json()["publishing"]["held"] is False
    assert await serving(world) == {good.version}


async def test_a_version_that_is_damaged_since_is_409_and_not_kept(world: World, client: httpx.AsyncClient) -> None:
    old, new = await served(world, 1, 2)
    damage(world, old)
    assert "sha256" in await problem(client, f"{URL}/{old.version}:activate", 409)
    assert "operator" not in world.store.leases()
    assert await serving(world) == {new.version}


async def test_a_version_that_the_board_does_not_know_is_not_activated(world: World, client: httpx.AsyncClient) -> None:
    (old, _) = await served(world, 1, 2)
    world.board.empty()
    assert "the board does not know" in await problem(client, f"{URL}/{old.version}:activate", 409)


async def test_a_board_that_is_away_is_503(
    world: World, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old, _) = await served(world, 1, 2)
    await asked(client, f"{URL}/{old.version}:activate")

    async def away() -> None:
        msg = "no answer within 5 s"
        raise StreamUnavailableError(msg)

    monkeypatch.setattr(world.board, "trainer", away)
    assert "no answer within 5 s" in await problem(client, f"{URL}:resume", 503)
    assert (await client.get(URL)).json()["publishing"]["version"] == old.version


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"reason": 3}', 422),
        (b'{"why": "x"}', 422),
        (b'{"\\ud800": 1}', 422),
        (b"[]", 422),
        (b"{", 422),
        (b'{"reason": "' + b"x" * 501 + b'"}', 422),
        (b" " * (routes.MAX_BODY_BYTES + 1), 413),
    ],
)
async def test_a_body_that_is_no_reason_changes_nothing(
    world: World, client: httpx.AsyncClient, body: bytes, status: int
) -> None:
    old, new = await served(world, 1, 2)
    await problem(client, f"{URL}/{old.version}:activate", status, content=body)
    assert await serving(world) == {new.version}


async def test_without_the_token_nothing_is_shown_or_done(world: World) -> None:
    old, new = await served(world, 1, 2)
    async with client_of(world, "secret") as client:
        assert (await client.get(URL)).status_code == 401
        for path in (f"{URL}/{old.version}:activate", f"{URL}/{old.version}:hold", f"{URL}:resume"):
            assert "auth.token" in await problem(client, path, 401, headers={"Authorization": "Bearer wrong"})
        right = {"Authorization": "Bearer secret"}
        assert (await client.post(f"{URL}:resume", headers=right)).status_code == 200
    assert await serving(world) == {new.version}


async def test_versions_are_shown_with_engines_and_what_their_rounds_took(
    world: World, client: httpx.AsyncClient
) -> None:
    world.engines[1].faults.scramble_load = True
    version = await world.publish(1)
    await world.settle()
    view = (await client.get(URL)).json()
    assert (view["target"], view["published"]) == (version.version, version.version)
    (shown,) = view["versions"]
    assert (shown["serving"], shown["held_by"]) == (["engine-0"], ["engine-0", "engine-1.loading", "target"])
    assert shown["bytes"] == sum(file.size for file in version.files)
    timings = shown["rounds"]["engine-0"].pop("timings")
    assert timings["bytes"] == shown["bytes"]
    assert 0 < timings["paused_s"] < timings["total_s"]
    assert shown["rounds"]["engine-0"] == {"error": ""}
    assert shown["rounds"]["engine-1"]["timings"] is None
    assert "differ from those verified" in shown["rounds"]["engine-1"]["error"]
    assert [engine["engine_id"] for engine in view["engines"]] == ["engine-0", "engine-1"]


async def test_the_openapi_document_has_the_routes_and_a_wrong_path_is_a_problem(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    posts = {path for path, methods in paths.items() if "post" in methods}
    assert posts == {f"{URL}/{{version}}:activate", f"{URL}/{{version}}:hold", f"{URL}:resume"}
    assert "not found" in (await problem(client, "/v1/weight", 404)).lower()


def damage(world: World, manifest: Manifest) -> None:
    """Change one byte of its tensors."""
    file = world.store.path(manifest.version) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")


def zeroed_checkpoint(folder: Path, seed: int) -> Path:
    """A toy checkpoint whose head is gone."""
    source = write_toy_checkpoint(folder / f"zeroed{seed}", seed)
    write_safetensors(source / "model.safetensors", {EMBED: floats(seed + 0.5, 1.0), HEAD: floats(0.0, 0.0, 0.0)})
    return source


async def test_a_guard_that_was_still_looking_does_not_overrule_a_resume(world: World) -> None:
    first, second = await served(world, 1, 2)
    await world.fleet.holds.resume(second.version, reason="I know", client="")
    found = Doubt("canary_drift", "too far")
    await world.fleet.holds.doubted(second.version, found, serving=first.version, stored=world.store.names())
    assert world.fleet.holds.control.held == {}
    assert gauge("canary_drift") == 0.0


async def test_what_is_fallen_back_to_is_nothing_that_was_found_damaged(
    world: World, client: httpx.AsyncClient
) -> None:
    first, second, third = await served(world, 1, 2, 3)
    world.fleet.refuse(second.version, "files", "sha256")
    assert (await asked(client, f"{URL}/{third.version}:hold"))["target"] == first.version


@pytest.mark.parametrize("path", [URL, "/v1/versions"])
async def test_a_store_that_cannot_be_read_is_503(
    world: World, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def broken() -> list[str]:
        msg = "Stale file handle"
        raise OSError(errno.ESTALE, msg)

    monkeypatch.setattr(world.store, "names", broken)
    response = await client.get(path)
    assert (response.status_code, response.headers["content-type"]) == (503, "application/problem+json")
    assert "Stale file handle" in response.json()["detail"]


async def test_what_is_activated_stays_in_the_store_though_a_resume_finds_nothing_newer(
    world: World, client: httpx.AsyncClient
) -> None:
    """An emptied board names no version; the target stays what it was."""
    old, _ = await served(world, 1, 2)
    for engine in world.engines:
        engine.faults.unreachable = True
    await asked(client, f"{URL}/{old.version}:activate")
    for seed in (3, 4, 5):
        await world.publish(seed)
    for holder in ("engine-0", "engine-1"):
        world.store.release(holder)
    world.board.empty()
    assert (await asked(client, f"{URL}:resume"))["target"] == old.version
    await world.fleet.collect()
    assert old.version in world.store.names()
