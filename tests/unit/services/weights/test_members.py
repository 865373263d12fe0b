"""Engines that come and go: brought up before they are in rotation, forgotten when they are gone for good."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from sao.board.base import EngineFacts, EngineState
from sao.streams.base import StreamUnavailableError
from sao.telemetry.health import Health
from services.weights import metrics
from services.weights.canary import Exact
from services.weights.discovery.base import Located
from services.weights.discovery.memory import MemoryDiscovery
from services.weights.engines.memory import MemoryEngine
from services.weights.keeper import Keeper, KeeperSettings
from services.weights.members import Members
from tests.support.waiting import eventually
from tests.unit.services.weights.world import World


class Scene:
    """A world whose engines are named by discovery."""

    def __init__(self, folder: Path, *addresses: str) -> None:
        self.world = World(folder, engines=0)
        self.discovery = MemoryDiscovery(addresses)
        self.engines: dict[str, MemoryEngine] = {}
        self.closed: list[str] = []
        self.members = self.start()

    def start(self) -> Members:
        """A new process of the weights service."""
        self.world.start()
        settings = KeeperSettings(attempts=2, poll_s=0.01, probe_s=0.0, cool_down_s=0.0)
        fleet, slots = self.world.fleet, self.world.slots

        def keeper(engine: MemoryEngine) -> Keeper:
            return Keeper(engine, fleet, settings, Exact(1e-4), Health(60), slots=slots)

        self.members = Members(self.discovery, fleet, slots, make_engine=self.engine, make_keeper=keeper)  # type: ignore[arg-type]
        return self.members

    def engine(self, located: Located) -> MemoryEngine:
        scene = self

        class Closing(MemoryEngine):
            async def close(self) -> None:
                scene.closed.append(self.engine_id)

        made = Closing(located.engine_id, self.world.folder / "launch", deadline_s=0.02)
        self.engines[located.engine_id] = made
        return made

    async def facts(self) -> dict[str, EngineFacts]:
        return await self.world.board.engines()

    async def serves(self, engine_id: str, version: str) -> bool:
        facts = (await self.facts()).get(engine_id)
        return facts is not None and (facts.state, facts.version) == (EngineState.SERVING, version)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The service's loop; a test looks by itself."""
        stop = asyncio.Event()
        task = asyncio.ensure_future(self.members.run(stop, every_s=3600.0))
        try:
            yield
        finally:
            stop.set()
            await task


async def test_an_engine_that_joins_is_brought_up_before_it_is_in_rotation(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "a")
    await scene.members.begin()
    version = (await scene.world.publish(1)).version
    async with scene.running():
        await eventually(lambda: scene.serves("engine-a", version), what="the first engine")
        scene.discovery.addresses = ["a", "b"]
        await scene.members.look()
        await eventually(lambda: scene.serves("engine-b", version), what="the one that joined")
    states = scene.world.board.states("engine-b")
    assert states[0] == "starting"
    assert states[-5:] == ["quiescing", "quiesced", "loading", "verifying", "serving"]
    assert sorted(scene.world.store.leases()) == ["engine-a", "engine-b", "target"]


async def test_an_engine_that_is_gone_for_good_is_forgotten_and_its_lease_given_back(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "a", "b")
    await scene.members.begin()
    version = (await scene.world.publish(1)).version
    async with scene.running():
        await eventually(partial(scene.serves, "engine-a", version), what="the first")
        await eventually(partial(scene.serves, "engine-b", version), what="the second")
        scene.discovery.addresses = ["a"]
        for _ in range(2):
            await scene.members.look()
        assert await scene.serves("engine-b", version), "two answers without it prove nothing yet"

        async def forgotten() -> bool:
            await scene.members.look()
            return "engine-b" not in await scene.facts()

        await eventually(forgotten, what="the engine that left to be forgotten")
    assert scene.closed == ["engine-b"]
    assert sorted(scene.world.store.leases()) == ["engine-a", "target"]
    assert [keeper.facts.engine_id for keeper in scene.members.keepers] == ["engine-a"]
    shown = {sample.labels["engine"] for metric in metrics.ENGINE_STATE.collect() for sample in metric.samples}
    assert "engine-b" not in shown
    assert "engine-a" in shown


async def test_one_answer_with_it_makes_an_engine_stay(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "a", "b")
    await scene.members.begin()
    for _ in range(5):
        for addresses in (["a"], ["a"], ["a", "b"]):
            scene.discovery.addresses = addresses
            await scene.members.look()
    assert sorted(await scene.facts()) == ["engine-a", "engine-b"]
    assert scene.closed == [], "it never left"


async def test_a_look_that_fails_changes_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "a")
    await scene.members.begin()
    scene.discovery.answers = False
    for _ in range(10):
        await scene.members.look()
    assert sorted(await scene.facts()) == ["engine-a"]


async def test_an_engine_that_comes_back_under_its_name_begins_anew(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "a")
    await scene.members.begin()
    version = (await scene.world.publish(1)).version
    async with scene.running():
        await eventually(lambda: scene.serves("engine-a", version), what="the engine")
        first = scene.engines["engine-a"]
        scene.discovery.addresses = []

        async def gone() -> bool:
            await scene.members.look()
            return not await scene.facts()

        await eventually(gone, what="the engine to leave")
        scene.discovery.addresses = ["a"]
        await scene.members.look()
        assert scene.engines["engine-a"] is not first
        await eventually(lambda: scene.serves("engine-a", version), what="the engine again")


async def _left_behind(scene: Scene) -> str:
    """Two engines that serve, and a service that ended; the version."""
    await scene.members.begin()
    version = (await scene.world.publish(1)).version
    async with scene.running():
        await eventually(partial(scene.serves, "engine-a", version), what="the first")
        await eventually(partial(scene.serves, "engine-b", version), what="the second")
    return version


async def test_what_the_board_still_names_of_an_earlier_process_is_forgotten_after_several_looks(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, "a", "b")
    version = await _left_behind(scene)
    scene.discovery.addresses = ["a"]
    await scene.start().begin()
    assert sorted(await scene.facts()) == ["engine-a", "engine-b"], "a name server that starts answers in part"
    await scene.world.fleet.follow()
    async with scene.running():
        await eventually(partial(scene.serves, "engine-b", version), what="the one that was not named")
        await scene.members.look()
        assert sorted(await scene.facts()) == ["engine-a", "engine-b"]

        async def forgotten() -> bool:
            await scene.members.look()
            return "engine-b" not in await scene.facts()

        await eventually(forgotten, what="the engine that left to be forgotten")
    assert sorted(scene.world.store.leases()) == ["engine-a", "target"]


async def test_an_engine_that_is_named_again_after_a_start_stays(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "a", "b")
    version = await _left_behind(scene)
    kept = (await scene.facts())["engine-b"].verified
    scene.discovery.addresses = ["a"]
    await scene.start().begin()
    await scene.world.fleet.follow()
    scene.discovery.addresses = ["a", "b"]
    async with scene.running():
        for _ in range(4):
            await scene.members.look()
        await eventually(partial(scene.serves, "engine-b", version), what="the engine")
        assert (await scene.facts())["engine-b"].verified == kept == [version]


async def test_an_engine_with_another_name_by_now_is_forgotten_at_once(tmp_path: Path) -> None:
    """After a change from a list to a name: two keepers of one engine would undo each other's rounds."""
    scene = Scene(tmp_path, "a")
    old = EngineFacts(engine_id="engine-0", url="memory://a", state=EngineState.SERVING, version="", since_s=1.0)
    await scene.world.board.write_engine(old)
    await scene.members.begin()
    assert sorted(await scene.facts()) == ["engine-a"]


async def test_a_board_that_is_away_puts_the_forgetting_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, "a")
    await scene.members.begin()
    scene.discovery.addresses = []

    async def away(engine_id: str, *, epoch: int) -> None:
        msg = f"{engine_id}: the board is away"
        raise StreamUnavailableError(msg)

    with monkeypatch.context() as patch:
        patch.setattr(scene.world.board, "remove_engine", away)
        for _ in range(4):
            await scene.members.look()
        assert sorted(await scene.facts()) == ["engine-a"]
    await scene.members.look()
    assert await scene.facts() == {}
    assert scene.members.keepers == []


async def test_a_keeper_that_breaks_ends_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, "a")
    await scene.members.begin()

    async def broken() -> bool:
        msg = "broken"
        raise ValueError(msg)

    monkeypatch.setattr(scene.members.keepers[0], "step", broken)
    with pytest.raises(ExceptionGroup) as caught:
        await scene.members.run(asyncio.Event(), every_s=3600.0)
    assert caught.group_contains(ValueError, match="broken")


async def test_a_store_that_fails_as_an_engine_joins_costs_what_was_known_of_it_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, "a")
    await scene.members.begin()
    version = (await scene.world.publish(1)).version

    def broken() -> dict[str, str]:
        msg = "Stale file handle"
        raise OSError(msg)

    async with scene.running():
        scene.discovery.addresses = ["a", "b"]
        with monkeypatch.context() as patch:
            patch.setattr(scene.world.store, "leases", broken)
            await scene.members.look()
        await eventually(lambda: scene.serves("engine-b", version), what="the one that joined")
