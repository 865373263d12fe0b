"""A rollout worker in this process, on in-memory engines and a task that counts turns."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from sao.board.base import Board, EngineFacts, EngineState
from sao.preference import PreferenceDocument
from sao.routing import RoutingShape
from sao.tasks.base import Episode, Observation, Prompt, Task
from sao.telemetry.health import Health
from sao.telemetry.traces import OFF, Tracer
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from services.rollout.engines.base import Engine
from services.rollout.engines.memory import MemoryEngine, Policy
from services.rollout.episode import EpisodeLimits, EpisodeRunner
from services.rollout.folder import TrajectoryFolder
from services.rollout.publisher import Publisher
from services.rollout.rotation import Rotation
from services.rollout.spool import Spool
from services.rollout.worker import Worker
from tests.support.ingest import VOCAB, Ingest
from tests.support.trajectories import VERSIONS

STOP = 2
OBSERVATION = [3, 4]
NO_TOKENIZER = cast("Tokenizer", None)
"""The task below knows token ids only."""


class CountEpisode:
    """Done after `turns` actions; before that each action gets OBSERVATION."""

    def __init__(self, prompt: Prompt) -> None:
        self._turns = int(str(prompt.data["turns"]))
        self.prompt_token_ids = [1, 8 + self._turns]
        self.stop_token_ids = [STOP]
        self.task_payload: Mapping[str, object] = {"turns": self._turns}

    def observe(self, action_token_ids: Sequence[int]) -> Observation:
        assert action_token_ids
        self._turns -= 1
        return Observation([], done=True) if self._turns == 0 else Observation(OBSERVATION, done=False)


class CountTask:
    """One to three turns, by the prompt."""

    name = "count"
    prompts_path = heldout_prompts_path = Path("/nonexistent")
    default_preference = PreferenceDocument(name="count", weights={"turns": 1.0})
    components = frozenset({"turns"})

    def episode(self, prompt: Prompt, tokenizer: Tokenizer) -> Episode:
        return CountEpisode(prompt)

    def score(self, trajectory: Trajectory, tokenizer: Tokenizer) -> Mapping[str, float]:
        return {"turns": float(trajectory.turns)}


def prompt_of(ordinal: int) -> Prompt:
    return Prompt(f"p{ordinal}", "", {"turns": ordinal % 3 + 1})


def often_stopping(_: Sequence[int]) -> Mapping[int, float]:
    """Half of the tokens end the turn."""
    return {STOP: 0.5, 5: 0.25, 6: 0.25}


def memory_engines(count: int = 1, policy: Policy = often_stopping) -> dict[str, MemoryEngine]:
    names = [f"engine-{index}" for index in range(count)]
    return {
        name: MemoryEngine(name, VOCAB, policy=policy, version=VERSIONS[0], seed=index)
        for index, name in enumerate(names)
    }


async def write_engine(
    board: Board,
    engine_id: str,
    state: EngineState = EngineState.SERVING,
    verified: Sequence[str] = VERSIONS[:1],
    *,
    version: str = VERSIONS[0],
) -> None:
    facts = EngineFacts(
        engine_id=engine_id,
        url="http://engine",
        state=state,
        version=version,
        verified=list(verified),
        since_s=time.time(),
    )
    await board.write_engine(facts)


LIMITS = EpisodeLimits(max_turns=4, max_new_tokens=8, max_tokens=96, turn_timeout_s=10.0)


def make_runner(
    rotation: Rotation,
    *,
    task: Task | None = None,
    limits: EpisodeLimits = LIMITS,
    run: str = "run",
    routing: RoutingShape | None = None,
    salted: bool = False,
    tracer: Tracer = OFF,
) -> EpisodeRunner:
    return EpisodeRunner(
        run=run,
        worker_id="worker-0",
        task=task or CountTask(),
        tokenizer=NO_TOKENIZER,
        prompt_of=prompt_of,
        rotation=rotation,
        limits=limits,
        routing=routing,
        salted=salted,
        tracer=tracer,
    )


async def open_spool(folder: Path, *, max_bytes: int = 2**20) -> Spool:
    """The spool and the dead folder of a worker that writes below `folder`."""
    spool = Spool(folder / "spool", dead=TrajectoryFolder(folder / "dead"), max_bytes=max_bytes)
    await spool.open()
    return spool


@dataclass(frozen=True)
class Running:
    task: asyncio.Task[None]
    stop: asyncio.Event
    rotation: Rotation
    health: Health
    publisher: Publisher
    spool: Spool


@contextlib.asynccontextmanager
async def working(
    ingest: Ingest,
    engines: Mapping[str, Engine],
    folder: Path,
    *,
    concurrency: int = 4,
    renew_every_s: float = 1.0,
    limits: EpisodeLimits = LIMITS,
    spool_bytes: int = 2**20,
    attempts: int = 3,
    plays: Task | None = None,
    tracer: Tracer = OFF,
    drain_s: float = 2.0,
) -> AsyncIterator[Running]:
    """A worker at work until the block ends."""
    stop = asyncio.Event()
    health = Health(stalled_after_s=60)
    rotation = Rotation(ingest.board, engines, refresh_s=0.005)
    spool = await open_spool(folder, max_bytes=spool_bytes)
    publisher = Publisher(ingest.stub, spool=spool, attempts=attempts, call_timeout_s=5.0, tracer=tracer)
    worker = Worker(
        "worker-0",
        stub=ingest.stub,
        runner=make_runner(rotation, task=plays, limits=limits, run=ingest.config.run.name, tracer=tracer),
        rotation=rotation,
        publisher=publisher,
        health=health,
        concurrency=concurrency,
        renew_every_s=renew_every_s,
        call_timeout_s=5.0,
        drain_s=drain_s,
    )
    view = asyncio.create_task(rotation.run())
    task = asyncio.create_task(worker.run(stop))
    try:
        yield Running(task, stop, rotation, health, publisher, spool)
    finally:
        stop.set()
        try:
            await task
        finally:
            view.cancel()
            spool.close()
