"""The reward service's application over in-memory stores, with a judge that the test steers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr

from sao.board.memory import MemoryBoard
from sao.streams.memory import MemoryStreams
from services.reward.scorers.memory import MemoryScorer
from tests.support.reward_app import wired
from tests.support.scored_tasks import SETTINGS
from tests.support.scorers import TASK


class Service:
    """The writing task, and `critic`, which judges `humour`; the token is s3cret."""

    def __init__(self, folder: Path) -> None:
        self.board, self.streams, self.folder = MemoryBoard(), MemoryStreams(), folder
        self.humour: float | Exception = 0.5
        self.held: asyncio.Event | None = None
        self.asked = 0
        judge = MemoryScorer("critic", {"humour": "How funny"}, self._judge, judges=True, deadline_s=0.2)
        service = wired(
            TASK,
            folder,
            board=self.board,
            streams=self.streams,
            token=SecretStr("s3cret"),
            settings=SETTINGS.model_dump(),
            scorers=[judge],
        )
        self.app = service.app

    async def _judge(self, _: Any) -> dict[str, float]:
        self.asked += 1
        if self.held is not None:
            await self.held.wait()
        if isinstance(self.humour, Exception):
            raise self.humour
        return {"humour": self.humour}

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(app=self.app)
        headers = {"Authorization": "Bearer s3cret"}
        async with httpx.AsyncClient(transport=transport, base_url="http://reward", headers=headers) as client:
            yield client

    async def score(self, **body: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.post("/v1/score", json=body)
