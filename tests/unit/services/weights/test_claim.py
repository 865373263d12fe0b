"""Two weights services of one run: the later start keeps the engines, and the other one ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sao.board.base import EngineState
from sao.board.memory import MemoryBoard
from sao.config import RunConfig
from sao.streams.base import FencedError, StreamUnavailableError
from services.weights import app
from services.weights.claim import EPOCHS_FOLDER, Claim
from tests.support.processes import free_port
from tests.support.waiting import eventually
from tests.unit.services.weights.world import World


def claim(board: MemoryBoard, folder: Path, owner: str) -> Claim:
    return Claim(board, folder / EPOCHS_FOLDER, owner=owner)


async def test_a_claim_is_above_every_one_before_also_when_the_board_forgot_them(tmp_path: Path) -> None:
    first = claim(MemoryBoard(), tmp_path, "one")
    await first.take()
    emptied = MemoryBoard()
    second = claim(emptied, tmp_path, "two")
    await second.take()
    assert second.epoch > first.epoch
    with pytest.raises(FencedError, match=r"\(two\) has started since"):
        await emptied.hold_weights_epoch(first.epoch, "one")


async def test_services_that_start_together_claim_different_epochs(tmp_path: Path) -> None:
    board = MemoryBoard()
    claims = [claim(board, tmp_path, str(number)) for number in range(8)]
    await asyncio.gather(*(one.take() for one in claims))
    assert sorted(one.epoch for one in claims) == list(range(1, 9))
    assert max(int(mark.name) for mark in (tmp_path / EPOCHS_FOLDER).iterdir()) == 8


async def test_a_fenced_service_ends_and_names_the_other(tmp_path: Path) -> None:
    board, stop = MemoryBoard(), asyncio.Event()
    first, second = claim(board, tmp_path, "one"), claim(board, tmp_path, "two")
    await first.take()
    running = asyncio.ensure_future(first.run(stop, every_s=0.01))
    await second.take()
    with pytest.raises(FencedError, match=r"epoch 1 is fenced: epoch 2 \(two\)"):
        await asyncio.wait_for(running, 10)


async def test_a_board_that_is_away_fences_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board, stop, asked = MemoryBoard(), asyncio.Event(), asyncio.Event()
    only = claim(board, tmp_path, "one")
    await only.take()

    async def away(epoch: int, owner: str) -> None:
        asked.set()
        msg = f"no answer to {owner} of epoch {epoch}"
        raise StreamUnavailableError(msg)

    monkeypatch.setattr(board, "hold_weights_epoch", away)
    running = asyncio.ensure_future(only.run(stop, every_s=0.01))
    await asyncio.wait_for(asked.wait(), 10)
    stop.set()
    await asyncio.wait_for(running, 10)


async def test_a_fenced_keeper_overwrites_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.restore()
    old = world.keepers[0]
    await world.publish(1)
    await world.settle()
    await world.board.new_weights_epoch("the other")
    later = await world.facts()
    world.engines[0].restart()
    world.now += 10.0
    with pytest.raises(FencedError, match="the other"):
        await old.step()
    assert await world.facts() == later
    assert later.state is EngineState.SERVING


async def test_the_later_service_wins_and_the_earlier_says_which(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = MemoryBoard()
    monkeypatch.setattr("sao.board.connect", lambda _: board)
    monkeypatch.setattr(app, "_HOLD_EVERY_S", 0.01)
    weights = run_config.weights.model_copy(update={"port": free_port()})
    config = run_config.model_copy(update={"weights": weights})
    earlier = asyncio.ensure_future(app.main(config, asyncio.Event()))
    await eventually(lambda: board.weights_epoch == 1, what="the first service to claim")
    later = claim(board, config.versions_dir, "host-b, process 2")
    await later.take()
    with pytest.raises(FencedError, match=r"epoch 2 \(host-b, process 2\) has started since"):
        await asyncio.wait_for(earlier, 10)
