"""What is done while an engine still serves, and what that costs the pause."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sao.board.base import EngineState
from sao.weights.base import Checksum, IncompleteVersionError
from sao.weights.checkpoint import sha256_of
from sao.weights.memory import MemoryVersionStore
from services.weights import metrics
from services.weights.staging import Staging, on_this_host
from tests.support.versions import publish
from tests.unit.services.weights.world import World


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class CountingStore(MemoryVersionStore):
    """Says how often a version was read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def verify(self, version: str, checksum: Checksum = sha256_of) -> None:
        self.reads.append(version)
        super().verify(version, checksum)


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:30000", True),
        ("http://[::1]:30000", True),
        ("http://localhost:1", True),
        ("http://10.0.0.5:30000", False),
        ("http://engine:30000", False),
        ("memory://engine-0", False),
    ],
)
def test_an_engine_on_this_host_has_a_loopback_address(url: str, here: bool) -> None:
    assert on_this_host(url) is here


def test_an_engine_under_this_hosts_name_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "pod-0")
    assert on_this_host("http://pod-0:30000")


async def test_a_version_is_read_once_for_all_engines_and_again_when_it_may_be_cold() -> None:
    store, clock = CountingStore(), Clock()
    version, staging = publish(store), Staging(store, warm_s=60.0, clock=clock)
    for local in (True, True, False):
        await staging.stage(version, local=local)
    assert store.reads == [version]
    clock.now = 60.1
    await staging.stage(version, local=False)
    assert store.reads == [version], "what another host has in its page cache is not ours to warm"
    await staging.stage(version, local=True)
    assert store.reads == [version] * 2


async def test_a_file_that_was_written_to_is_read_again() -> None:
    store = CountingStore()
    version, staging = publish(store), Staging(store)
    await staging.stage(version, local=True)
    file = store.path(version) / "model.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(bytes(damaged))
    os.utime(file, ns=(1, 1))
    with pytest.raises(IncompleteVersionError, match=r"model\.safetensors has sha256"):
        await staging.stage(version, local=True)


async def test_what_the_fleet_inspected_is_not_read_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store = CountingStore()
    world.start()
    await world.restore()
    version = (await world.publish(1)).version
    await world.settle()
    assert (await world.facts()).version == version
    assert world.store.reads == [version]


def _damage(world: World, version: str) -> None:
    (world.store.path(version) / "model.safetensors").write_bytes(b"torn")


async def test_a_version_damaged_since_it_was_inspected_costs_a_serving_engine_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.restore()
    good = (await world.publish(1)).version
    await world.settle()
    calls = len(world.engines[0].calls)
    bad = (await world.publish(2)).version
    _damage(world, bad)
    seen = len(world.board.history)
    await world.settle()
    assert world.board.states()[seen:] == []
    assert "pause" not in world.engines[0].calls[calls:]
    assert (await world.facts()).version == good
    assert "model.safetensors has 4 bytes" in world.fleet.refused[bad]
    newest = (await world.publish(3)).version
    await world.settle()
    assert (await world.facts()).version == newest


async def test_an_engine_that_serves_nobody_says_that_its_version_is_damaged(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.restore()
    bad = (await world.publish(1)).version
    _damage(world, bad)
    await world.settle()
    facts = await world.facts()
    assert facts.state is EngineState.QUARANTINED
    assert "model.safetensors has 4 bytes" in facts.error
    newest = (await world.publish(2)).version
    await world.settle()
    assert (await world.facts()).version == newest


async def test_a_round_says_what_it_took(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.restore()
    assert [keeper.last_round for keeper in world.keepers] == [None]
    before = metrics.LOADED_BYTES.labels("engine-0")._value.get()
    manifest = await world.publish(1)
    await world.settle()
    took = world.keepers[0].last_round
    assert took is not None
    assert took.bytes == sum(file.size for file in manifest.files)
    assert 0 < took.loaded_s <= took.paused_s
    assert took.paused_s + took.verified_s <= took.total_s
    assert took.staged_s > 0
    assert metrics.LOADED_BYTES.labels("engine-0")._value.get() - before == took.bytes
    assert 0 < metrics.PAUSED_RATIO.labels("engine-0")._value.get() <= 1


async def test_nothing_but_the_load_is_in_the_pause(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.restore()
    await world.publish(1)
    await world.settle()
    calls = world.engines[0].calls
    start = len(calls)
    await world.publish(2)
    await world.settle()
    paused = calls[calls.index("pause", start) : calls.index("resume", start) + 1]
    assert paused == ["pause", "load", "resume"]


async def test_an_engine_with_nothing_to_be_brought_to_is_looked_at_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    await world.restore()
    await world.publish(1)
    await world.settle()
    _damage(world, (await world.publish(2)).version)
    monkeypatch.setattr(world.fleet, "last_good", lambda _: None)
    await world.settle()
    assert (await world.facts()).in_rotation
    world.engines[0].restart()
    await world.settle(1.5)
    assert (await world.facts()).state is EngineState.QUARANTINED


async def _fleet_that_serves(folder: Path) -> tuple[World, str, str]:
    """Three engines; the version before, and the one that they serve."""
    world = World(folder, engines=3)
    await world.restore()
    before = (await world.publish(1)).version
    await world.settle()
    version = (await world.publish(2)).version
    await world.settle()
    return world, before, version


async def test_a_file_found_damaged_when_one_engine_restarts_costs_only_that_engine(tmp_path: Path) -> None:
    world, _, version = await _fleet_that_serves(tmp_path)
    _damage(world, version)
    world.engines[1].restart()
    for _ in range(12):
        await world.settle(10.0)
    facts = [await world.facts(index) for index in range(3)]
    assert [(one.state, one.version) for one in (facts[0], facts[2])] == [(EngineState.SERVING, version)] * 2
    assert facts[1].state is EngineState.QUARANTINED
    assert "model.safetensors has 4 bytes" in facts[1].error
    assert world.fleet.refused == {}
    newest = (await world.publish(3)).version
    await world.settle()
    assert [(await world.facts(index)).version for index in range(3)] == [newest] * 3


async def test_an_engine_that_waits_for_a_damaged_file_serves_when_it_is_mended(tmp_path: Path) -> None:
    world, _, version = await _fleet_that_serves(tmp_path)
    file = world.store.path(version) / "model.safetensors"
    whole = file.read_bytes()
    _damage(world, version)
    world.engines[1].restart()
    await world.settle(1.5)
    assert not (await world.facts(1)).in_rotation
    file.write_bytes(whole)
    await world.settle(10.0)
    facts = await world.facts(1)
    assert (facts.state, facts.version) == (EngineState.SERVING, version)


async def test_a_damaged_file_takes_the_fleet_back_when_nobody_serves_it_any_more(tmp_path: Path) -> None:
    world, before, version = await _fleet_that_serves(tmp_path)
    _damage(world, version)
    for engine in world.engines:
        engine.restart()
        await world.settle(1.5)
    await world.fleet.follow()
    await world.settle(1.5)
    assert version in world.fleet.refused
    assert [(await world.facts(index)).version for index in range(3)] == [before] * 3
    assert all([(await world.facts(index)).in_rotation for index in range(3)])
