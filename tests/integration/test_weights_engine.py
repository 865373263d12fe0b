"""Rounds of the weights service on a real SGLang server that does not fail, with transformers as the oracle."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from sao.board.base import EngineState
from sao.board.memory import MemoryBoard
from sao.telemetry.health import Health
from sao.weights.control import CONTROL_FILE, ControlFile
from sao.weights.filesystem import FileSystemVersionStore
from sao.weights.manifest import Manifest
from services.weights.canary import Exact
from services.weights.engines.base import GeneratedToken, PauseMode
from services.weights.engines.sglang import SGLangEngine
from services.weights.fleet import Fleet
from services.weights.holds import Holds
from services.weights.keeper import Keeper, KeeperSettings
from tests.support.versions import CANARY, announce, publish_checkpoint
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from tests.support.engine import EngineServer

pytestmark = pytest.mark.engine


def transformers_logprobs(directory: Path, token_ids: Sequence[int]) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        logp = torch.log_softmax(model(ids).logits[0].float(), -1)
    found: list[float] = logp[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    return found


@dataclass
class Service:
    """The weights service's parts, stepped by the test."""

    board: MemoryBoard
    store: FileSystemVersionStore
    fleet: Fleet
    keeper: Keeper
    engine: SGLangEngine
    updates: int = 0

    async def publish(
        self, source: Path, oracle: Callable[[Path, Sequence[int]], list[float]] = transformers_logprobs
    ) -> Manifest:
        if self.board.newest_epoch == 0:
            await self.board.new_trainer_epoch()
        manifest = publish_checkpoint(self.store, source, oracle, update=self.updates)
        self.updates += 1
        await announce(self.board, manifest)
        await self.fleet.follow()
        return manifest

    async def settle(self) -> None:
        for _ in range(16):
            if await self.keeper.step():
                continue
            if self.keeper._reading is None:
                return
            await asyncio.wait([self.keeper._reading[1]])


def service_on(url: str, root: Path) -> Service:
    board, store = MemoryBoard(), FileSystemVersionStore(root, 0)
    engine = SGLangEngine("engine-0", url, deadline_s=20.0)
    fleet = Fleet(board, store, ["engine-0"], keep_versions=4, holds=Holds(ControlFile(root / CONTROL_FILE)))
    settings = KeeperSettings(attempts=1, poll_s=0.01, probe_s=0.0)
    return Service(board, store, fleet, Keeper(engine, fleet, settings, Exact(1e-4), Health(60)), engine)


@pytest.fixture
async def service(
    sglang_engine: EngineServer, tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> AsyncIterator[Service]:
    made = service_on(sglang_engine.url, tmp_path / "versions")
    await made.fleet.restore()
    await made.keeper.restore()
    await made.settle()
    yield made
    await made.engine.pause()
    await made.engine.load(tiny_checkpoints[0], "initial")
    await made.engine.resume()
    await made.engine.close()


async def test_two_versions_round_trip_with_the_log_probs_of_transformers(
    service: Service, tiny_checkpoints: tuple[Path, Path]
) -> None:
    held_out = [[1, 12, 30, 4, 4, 9, 17, 2, 5], [1, 3, 3, 3]]
    for source in (*tiny_checkpoints, tiny_checkpoints[0]):
        manifest = await service.publish(source)
        await service.settle()
        assert service.keeper.facts.state is EngineState.SERVING, service.keeper.facts.error
        assert service.keeper.facts.version == manifest.version
        for ids, found in zip(held_out, await service.engine.score(held_out), strict=True):
            assert found == pytest.approx(transformers_logprobs(source, ids), abs=1e-5)
    assert len(service.keeper.facts.verified) == 3


@asynccontextmanager
async def in_flight(url: str) -> AsyncIterator[asyncio.Future[httpx.Response]]:
    """A turn of 60 tokens that has begun, on an engine that is slow until the block ends."""
    request = {
        "input_ids": CANARY[0],
        "sampling_params": {"max_new_tokens": 60, "ignore_eos": True},
        "return_logprob": True,
    }
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:

        async def begun() -> bool:
            loads = (await client.get("/v1/loads")).json()["loads"]
            return any(load["num_running_reqs"] > 0 for load in loads)

        await client.post("/slow_down", json={"forward_sleep_time": 0.02})
        turn = asyncio.ensure_future(client.post("/generate", json=request))
        try:
            await eventually(begun, what="a turn in flight", timeout_s=20.0)
            yield turn
        finally:
            await client.post("/slow_down", json={"forward_sleep_time": None})
            await turn


async def test_a_request_in_flight_goes_on_and_names_both_versions(
    service: Service, sglang_engine: EngineServer, tiny_checkpoints: tuple[Path, Path]
) -> None:
    first = await service.publish(tiny_checkpoints[0])
    await service.settle()
    async with in_flight(sglang_engine.url) as turn:
        second = await service.publish(tiny_checkpoints[1])
        await service.settle()
    meta = turn.result().json()["meta_info"]
    assert service.keeper.facts.version == second.version
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans] == [first.version, second.version]
    assert spans[0]["start"] == 0
    assert spans[0]["end"] == spans[1]["start"]
    assert spans[1]["end"] == 60
    assert all(math.isfinite(row[0]) for row in meta["output_token_logprobs"])


def paused_by(service: Service, mode: PauseMode) -> None:
    settings = KeeperSettings(attempts=1, poll_s=0.01, probe_s=0.0, mode=mode)
    service.keeper = Keeper(service.engine, service.fleet, settings, Exact(1e-4), Health(60))


async def test_in_place_a_turn_keeps_its_keys_and_values_and_a_new_one_reads_none_of_them(
    service: Service, sglang_engine: EngineServer, tiny_checkpoints: tuple[Path, Path]
) -> None:
    paused_by(service, PauseMode.IN_PLACE)
    first = await service.publish(tiny_checkpoints[0])
    await service.settle()
    async with in_flight(sglang_engine.url) as turn:
        second = await service.publish(tiny_checkpoints[1])
        await service.settle()
    assert (service.keeper.facts.state, service.keeper.facts.version) == (EngineState.SERVING, second.version)
    meta = turn.result().json()["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == [first.version, second.version]
    assert meta["num_retractions"] == 0
    assert (await service.engine.generate_one(CANARY[0], salt=first.version)).cached_tokens > 0, "nothing was flushed"
    found = (await service.engine.score([CANARY[1]]))[0]
    assert found == pytest.approx(transformers_logprobs(tiny_checkpoints[1], CANARY[1]), abs=1e-5)


async def test_an_abort_ends_the_turn_and_the_engine_serves_the_new_version(
    service: Service, sglang_engine: EngineServer, tiny_checkpoints: tuple[Path, Path]
) -> None:
    paused_by(service, PauseMode.ABORT)
    first = await service.publish(tiny_checkpoints[0])
    await service.settle()
    async with in_flight(sglang_engine.url) as turn:
        second = await service.publish(tiny_checkpoints[1])
        await service.settle()
    assert (service.keeper.facts.state, service.keeper.facts.version) == (EngineState.SERVING, second.version)
    meta = turn.result().json()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert {span["version"] for span in meta["weight_versions"]} <= {first.version}


async def test_an_engine_that_was_changed_behind_our_back_is_brought_in_again(
    service: Service, tiny_checkpoints: tuple[Path, Path]
) -> None:
    manifest = await service.publish(tiny_checkpoints[1])
    await service.settle()
    await service.engine.pause()
    await service.engine.load(tiny_checkpoints[0], "initial")
    await service.engine.resume()
    await service.settle()
    assert service.keeper.facts.in_rotation
    token: GeneratedToken = await service.engine.generate_one(CANARY[1])
    assert token.version == manifest.version
