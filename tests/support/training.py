"""A trainer in one process: real algorithm, backend, archive, checkpoints and version store; streams in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from sao.archive import Archive
from sao.board.base import Board
from sao.board.memory import MemoryBoard
from sao.config.schema import RunConfig
from sao.ids import uuid7
from sao.invariants import Limits
from sao.outcome import RewardOutcome, Scored
from sao.preference import PreferenceDocument
from sao.routing import replayed_routing
from sao.slots import Slots
from sao.streams.base import StreamName, TrajectoryStreams, routed_experts_key
from sao.streams.memory import MemoryStreams
from sao.telemetry.health import Health
from sao.telemetry.traces import OFF, Tracer
from sao.v1 import trajectory_pb2 as pb
from sao.weights.filesystem import FileSystemVersionStore
from services.trainer.backends.torch_reference import TorchReferenceBackend
from services.trainer.batcher import batcher_of
from services.trainer.canary import canary_sequences
from services.trainer.checkpoint import CheckpointStore
from services.trainer.consumer import Consumer
from services.trainer.core.baselines import reward_range
from services.trainer.core.update import Update, UpdateSettings, UpdateStats
from services.trainer.drops import Drops
from services.trainer.loop import Parts, TrainerLoop, fresh_progress
from services.trainer.publisher import Publisher, roll_back
from services.trainer.ranks import Ranks
from services.trainer.recovery import lost_work, never_again, undone
from services.trainer.restoring import ANNOUNCED_FILE, claim_store

ROOT = "v00000001"
"""The first version a fresh trainer publishes."""
PREFERENCE = PreferenceDocument(name="right", weights={"right": 1.0})


def random_trajectory(rng: random.Random, run: str, *, version: str = ROOT, turns: int = 2) -> pb.Trajectory:
    """Two turns of random tokens with plausible log-probs, valid in every invariant."""
    segments: list[pb.Segment] = []
    for _ in range(turns):
        n = rng.randint(3, 8)
        span = pb.VersionSpan(version=version, start=0, end=n)
        ids = [rng.randrange(3, 32) for _ in range(n)]
        logprobs = [-rng.uniform(1.0, 5.0) for _ in range(n)]
        segments.append(pb.Segment(kind=pb.SEGMENT_KIND_ACTION, token_ids=ids, logprobs=logprobs, versions=[span]))
        observed = [rng.randrange(3, 32) for _ in range(4)]
        segments.append(pb.Segment(kind=pb.SEGMENT_KIND_OBSERVATION, token_ids=observed))
    segments.pop()
    return pb.Trajectory(
        id=uuid7(),
        run=run,
        task="calculator",
        prompt_id="p",
        attempt=1,
        prompt_token_ids=[1, 5, 6, 7],
        segments=segments,
        sampling=pb.SamplingConfig(temperature=1, top_p=1, top_k=-1, repetition_penalty=1),
        finish_reason=pb.FINISH_REASON_STOP,
        engine_id="engine-0",
        worker_id="worker-0",
        turns=[pb.TurnTiming(started_s=1.0, engine_s=0.1) for _ in range(turns)],
        task_payload_json="{}",
    )


@dataclass
class World:
    """All that outlives a trainer process."""

    config: RunConfig
    initial: Path
    board: Board = field(default_factory=MemoryBoard)
    streams: TrajectoryStreams = field(default_factory=MemoryStreams)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    slot: int = 0
    tracer: Tracer = OFF

    async def deliver(
        self,
        trajectory: pb.Trajectory | None = None,
        outcome: RewardOutcome | None = None,
        *,
        payload: bytes | None = None,
        scored_under: int = 1,
        place: tuple[int, int] | None = None,
        reward: float | None = None,
        routed_experts: bytes = b"",
        rescores: int = 0,
    ) -> str:
        """Put one scored trajectory on the SCORED stream, at the next (ordinal, sample) or at `place`; its id."""
        message = trajectory or random_trajectory(self.rng, self.config.run.name)
        ordinal, sample = place or divmod(self.slot, self.config.samples)
        message.ordinal = ordinal
        if trajectory is None:
            message.sample = sample
        message.routed_experts_key = routed_experts_key(message.id) if routed_experts else ""
        reward = float(self.slot % 2) if reward is None else reward
        scored = outcome or Scored(
            components={"right": reward}, value=reward, scored_under=scored_under, scoring_started_s=1.0
        )
        await self.streams.append(
            message.id,
            message.SerializeToString() if payload is None else payload,
            ordinal=ordinal,
            sample=sample,
            fields={"task": message.task, "ordinal": str(ordinal), "rescores": str(rescores)},
            routed_experts=routed_experts,
        )
        self.slot += place is None
        await self.streams.open_consumer(StreamName.TRAJECTORIES, "reward")
        (delivery,) = await self.streams.read(StreamName.TRAJECTORIES, "reward", count=1, block_ms=0)
        fields = {**delivery.fields, "outcome": scored.model_dump_json()}
        assert await self.streams.move(delivery, "reward", StreamName.SCORED, fields)
        return message.id

    async def deliver_many(self, count: int) -> list[str]:
        return [await self.deliver() for _ in range(count)]

    async def settled(self, ids: Sequence[str]) -> list[str]:
        """Those of these ids whose payload is gone."""
        return [i for i in ids if await self.streams.payload(i) is None]

    async def start(self) -> Trainer:
        """A trainer process over this world, restored from the newest whole checkpoint."""
        return await Trainer.start(self)


def _limits(config: RunConfig, model: Path) -> Limits:
    routing = replayed_routing(config, model)
    return Limits(config.run.name, 32, 512, 2**20, 1e-5, samples=config.samples, routing=routing)


@dataclass
class Trainer:
    """One life of the trainer process."""

    world: World
    loop: TrainerLoop
    parts: Parts
    backend: TorchReferenceBackend
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def start(cls, world: World) -> Trainer:
        torch.set_num_threads(1)
        config = world.config
        if await world.board.preference() is None:
            await world.board.put_preference(PREFERENCE)
        checkpoints = CheckpointStore(config.run.dir / "checkpoints", config.run.name, 3, 0, 0)
        restored = checkpoints.newest()
        store = FileSystemVersionStore(config.versions_dir, 0)
        archive = Archive(config.run.dir / "archive")
        progress = restored.progress if restored is not None else fresh_progress(config.run.name)
        again = undone(archive, progress, config.samples)
        claim = await claim_store(
            config.run.dir,
            board=world.board,
            streams=world.streams,
            store=store,
            archive=archive,
            done=never_again(progress, again.values()),
            samples=config.samples,
            horizon_h=config.ingest.seen_horizon_h,
        )
        await roll_back(world.board, store)
        backend = TorchReferenceBackend(config, world.initial)
        ranks = Ranks(backend, Update(backend, UpdateSettings.of(config)))
        if restored is not None:
            ranks.load(restored.backend_dir)
        drops = Drops.of(config.run.dir, claim.epoch, progress.dropped)
        consumer = Consumer(
            world.streams,
            world.board,
            config.trainer,
            _limits(config, world.initial),
            epoch=claim.epoch,
            restored=[] if claim.emptied else progress.unsettled_ids,
            forgone=progress.forgone_ids,
            undone=again,
            done=Slots(progress.done),
            drops=drops,
            defer_consumed=config.algorithm.synchronous,
            reward_range=reward_range(config),
            tracer=world.tracer,
        )
        consumer.requeue(await lost_work(archive, progress, world.streams, drops.let_go()))
        publisher = Publisher(
            store=store,
            board=world.board,
            run=config.run.name,
            epoch=claim.epoch,
            initial=world.initial,
            canary=canary_sequences([[1, 5, 6]], 32, 0),
            keep_versions=4,
            announced=config.run.dir / ANNOUNCED_FILE,
        )
        health = Health(60.0)
        parts = Parts(
            config,
            ranks,
            world.streams,
            world.board,
            consumer,
            batcher_of(config, consumer),
            publisher,
            checkpoints,
            archive,
            health,
            claim.epoch,
            world.tracer,
        )
        return cls(world, TrainerLoop(parts, progress), parts, backend)

    async def run(self) -> None:
        """Until the run's last update, or until `stop` is set."""
        await asyncio.wait_for(self.loop.run(self.stop), 60)

    async def run_updates(self, count: int) -> None:
        """Run, be asked to stop in good order during the `count`-th optimiser step, and end."""
        finish = self.parts.ranks.finish
        left = count

        def counted() -> UpdateStats:
            nonlocal left
            left -= 1
            if left == 0:
                self.stop.set()
            return finish()

        self.parts.ranks.finish = counted  # type: ignore[method-assign]
        if count == 0:
            self.stop.set()
        await self.run()

    async def run_until_crash(self, owner: object, call: str, *, at: int) -> None:
        """Run, and lose power at the start of the `at`-th call of `owner.call`."""
        original = getattr(owner, call)
        left = at

        def crashing(*arguments: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise PowerFailureError
            return original(*arguments, **keywords)

        setattr(owner, call, crashing)
        with pytest.raises(PowerFailureError):
            await self.run()
        setattr(owner, call, original)


class PowerFailureError(BaseException):
    """The process ends here; no handler of the code under test runs."""
