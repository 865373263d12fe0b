"""The reward service's consumer and feedback desk over one pair of stores, with a clock that a test turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from sao.board.base import Board
from sao.config.schema import FeedbackSection, PreferenceBounds, RewardSection
from sao.outcome import OUTCOME, Scored
from sao.preference import PreferenceDocument
from sao.streams.base import StreamName, TrajectoryStreams
from sao.streams.room import WaitingRoom
from sao.tasks.base import Task
from sao.tasks.calculator import Calculator
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from sao.telemetry.health import Health
from sao.telemetry.traces import OFF, Tracer
from services.reward.app import create_app
from services.reward.catalogue import Catalogue
from services.reward.consumer import Consumer
from services.reward.feedback.desk import Desk
from services.reward.feedback.routes import FeedbackRoutes
from services.reward.preferences.folder import Keeper, PreferenceFolder
from services.reward.preferences.routes import PreferenceRoutes
from services.reward.scorer import TrajectoryScorer
from tests.support.scored_tasks import SETTINGS, always
from tests.support.waiting import eventually

LIKED = PreferenceDocument(name="liked", weights={"correct": 0.5, "feedback": 0.5})
PLAIN = PreferenceDocument(name="plain", weights={"correct": 1.0})
TOKENIZER = tokenizer_of_run(None, Calculator())


@dataclass
class Reception:
    """Everything that feedback passes through, one replica of it."""

    streams: TrajectoryStreams
    board: Board
    settings: FeedbackSection
    run_dir: Path
    now_s: float = 1_000_000.0
    task: Task = field(default_factory=always)
    consumer: str = "reward-0"
    claim_idle_s: float = 30.0
    room: WaitingRoom | None = None
    """Another view of the streams' room, where a test wants one."""
    tracer: Tracer = OFF

    @property
    def desk(self) -> Desk:
        """A new one every time: all that lasts is in the store."""
        room = self.room or self.streams.room
        return Desk(room, self.board.preference, self.settings, wall_clock=lambda: self.now_s, tracer=self.tracer)

    def client(self) -> httpx.AsyncClient:
        """To the REST interface."""
        keeper = Keeper(self.board, PreferenceFolder(self.run_dir))
        catalogue = Catalogue(self.task, RewardSection(feedback=self.settings))
        preferences = PreferenceRoutes(self.board, catalogue, keeper, PreferenceBounds(), self.run_dir / "archive")
        routers = [preferences.router(), FeedbackRoutes(self.desk, self.streams, TOKENIZER).router()]
        app = create_app(self.task, catalogue, Health(60.0), None, routers)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://reward")

    @contextlib.asynccontextmanager
    async def consuming(self) -> AsyncIterator[None]:
        """Trajectories are scored, or parked, until the block ends."""
        own = {"consumer": self.consumer, "claim_idle_s": self.claim_idle_s, "feedback": self.settings}
        settings = SETTINGS.model_copy(update=own)
        scorer = TrajectoryScorer(self.task, TOKENIZER, self.board.preference, settings, wall_clock=lambda: self.now_s)
        stop = asyncio.Event()
        running = asyncio.ensure_future(
            Consumer(self.streams, scorer, settings, Health(60.0), desk=self.desk, tracer=self.tracer).run(stop)
        )
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait_for(running, 20)

    async def consume(self) -> None:
        """Score or park what is on TRAJECTORIES now."""
        async with self.consuming():
            await eventually(self.nothing_left, what="an empty trajectories stream")

    async def nothing_left(self) -> bool:
        """Whether TRAJECTORIES is empty."""
        return (await self.streams.depth(StreamName.TRAJECTORIES)).length == 0

    async def waiting(self) -> list[str]:
        """Ids in the room, oldest first."""
        return [one.trajectory_id for one in await self.streams.room.waiting(count=1000)]

    async def scored(self) -> dict[str, Scored]:
        """What is newly on SCORED."""
        await self.streams.open_consumer(StreamName.SCORED, "trainer")
        found = {}
        while batch := await self.streams.read(StreamName.SCORED, "trainer", count=1000, block_ms=0):
            for delivery in batch:
                outcome = OUTCOME.validate_json(delivery.fields["outcome"])
                assert isinstance(outcome, Scored)
                found[delivery.trajectory_id] = outcome
        return found

    async def buried(self) -> dict[str, str]:
        """Reasons by id."""
        return {letter.trajectory_id: letter.reason for letter in await self.streams.dead_letters(count=1000)}


async def post(client: httpx.AsyncClient, trajectory: str, value: float, **query: str) -> httpx.Response:
    """Say something of a trajectory."""
    return await client.post("/v1/feedback", json={"trajectory": trajectory, "value": value}, params=query)
