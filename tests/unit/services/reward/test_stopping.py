"""How the reward service ends: all of its parts, also one that loses a cancellation."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from sao.endings import TIMES, end
from services.reward.app import _together


class Serving:
    """Stands for the HTTP server."""

    async def serve(self, sockets: list[socket.socket]) -> None:
        await asyncio.sleep(0.01)


class Consuming:
    """Stands for the consumer."""

    async def run(self, stop: asyncio.Event) -> None:
        await stop.wait()


async def losing(cancellations: int, ended: asyncio.Event) -> None:
    """Goes on after that many cancellations, as a call does whose own end came in the same moment."""
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancellations -= 1
            if cancellations < 0:
                ended.set()
                raise


async def together(lost: int, disturb: Callable[[asyncio.Task[None], asyncio.Event], None]) -> bool:
    """Whether the part ended that loses so many cancellations; TimeoutError when the service does not end."""
    stop, ended = asyncio.Event(), asyncio.Event()
    parts: Any = (Serving(), None, Consuming())
    with socket.socket() as listener:
        server, _, consumer = parts
        running = asyncio.ensure_future(_together(server, listener, consumer, [losing(lost, ended)], stop))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        disturb(running, stop)
        done, _ = await asyncio.wait({running}, timeout=10)
        if not done:
            running.cancel()
            raise TimeoutError
        if not running.cancelled():
            running.result()
    return ended.is_set()


def stopped(running: asyncio.Task[None], stop: asyncio.Event) -> None:
    stop.set()


def stopped_twice(running: asyncio.Task[None], stop: asyncio.Event) -> None:
    stop.set()
    running.cancel()


@pytest.mark.parametrize("disturb", [stopped, stopped_twice])
@pytest.mark.parametrize("lost", [0, 1, 3])
async def test_it_ends_though_a_part_loses_cancellations(
    disturb: Callable[[asyncio.Task[None], asyncio.Event], None], lost: int
) -> None:
    assert await together(lost, disturb)


async def test_a_part_that_never_ends_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.reward.app.end", partial(end, again_s=0.01))
    assert not await together(TIMES, stopped)
