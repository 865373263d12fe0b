"""A trajectory through worker, ingest, reward service and trainer is one trace at a real collector, without a text."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest

from sao.config import RunConfig, load_run_config
from sao.config.schema import FeedbackSection
from sao.ids import uuid7
from sao.rows import read_rows
from sao.streams.base import TrajectoryStreams
from sao.tasks.base import Episode, Observation, Prompt
from sao.telemetry.health import Health
from sao.telemetry.traces import Tracer, connect
from sao.telemetry.traces.base import Recorded
from sao.telemetry.traces.memory import MemoryTracer
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from sao.v1 import ingest_pb2 as pb
from sao.v1 import trajectory_pb2
from services.reward.app import wire
from services.rollout.engines.memory import MemoryEngine
from services.rollout.publisher import Publisher
from tests.support.ingest import Ingest, memory_ingest, serving
from tests.support.otlp import receiver, tree
from tests.support.reception import LIKED, Reception, post
from tests.support.rollout_worker import (
    NO_TOKENIZER,
    STOP,
    CountEpisode,
    CountTask,
    memory_engines,
    open_spool,
    working,
    write_engine,
)
from tests.support.scored_tasks import always
from tests.support.stores import memory_stores, redis_stores
from tests.support.training import ROOT, World
from tests.support.trajectories import good
from tests.support.waiting import eventually

MARKER = "a secret that somebody wrote"
SERVICES = ("rollout", "ingest", "reward", "trainer")


class TellingEpisode(CountEpisode):
    """One that carries a text in its payload."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.task_payload = {**self.task_payload, "answer": MARKER}


class TellingTask(CountTask):
    """Texts wherever a task may have some."""

    def episode(self, prompt: Prompt, tokenizer: Tokenizer) -> Episode:
        return TellingEpisode(prompt)


def run_of(valkey_url: str, folder: Path, *sets: str) -> RunConfig:
    base = [
        f"run.name=test-{uuid.uuid4().hex[:12]}",
        f'run.dir="{folder / "run"}"',
        f'redis.url="{valkey_url}"',
        "ingest.max_message_mb=1",
        "ingest.max_tokens=512",
        "trainer.trajectories_per_update=1",
        "critic.pretrain_trajectories=0",
        "critic.warmup_updates=0",
        "trainer.max_lag=100",
    ]
    return load_run_config(None, [*base, *sets], env={})


@dataclass(frozen=True)
class Loop:
    """A run from its first prompt to its last update, every part traced by a tracer of its own."""

    config: RunConfig
    tracers: Mapping[str, Tracer]

    async def run(self, valkey_url: str, model: Path, folder: Path) -> list[str]:
        """Until the run's last update; ids of what was trained."""
        run = self.config.run.name
        async with redis_stores(valkey_url, run=run) as stores:
            await stores.board.put_preference(CountTask.default_preference)
            world = World(
                self.config, model, board=stores.board, streams=stores.streams, tracer=self.tracers["trainer"]
            )
            trainer = asyncio.ensure_future((await world.start()).run())
            await eventually(lambda: self._announced(world), what="the first version", timeout_s=30)
            served = serving(
                self.config, stores.streams, stores.board, stores.ledger, announced=(), tracer=self.tracers["ingest"]
            )
            async with served as ingest, self._rewarding(world):
                await write_engine(stores.board, "engine-0")
                tracer = self.tracers["rollout"]
                async with working(ingest, memory_engines(), folder, concurrency=1, plays=TellingTask(), tracer=tracer):
                    await asyncio.wait_for(trainer, 60)
        rows = read_rows(self.config.run.dir / "updates.jsonl")
        return [one.id for row, _ in rows for one in row.trajectories]

    @staticmethod
    async def _announced(world: World) -> bool:
        return ROOT in await world.board.versions()

    @contextlib.asynccontextmanager
    async def _rewarding(self, world: World) -> AsyncIterator[None]:
        parts = wire(
            self.config,
            TellingTask(),
            NO_TOKENIZER,
            board=world.board,
            streams=world.streams,
            health=Health(60.0),
            tracer=self.tracers["reward"],
        )
        stop = asyncio.Event()
        consuming = asyncio.ensure_future(parts.consumer.run(stop))
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait_for(consuming, 20)


async def all_closed(tracers: Mapping[str, Tracer]) -> None:
    for tracer in tracers.values():
        await tracer.close()


def shape(trace: Sequence[tuple[str, Recorded]]) -> set[tuple[str, str, str]]:
    """Service, span and the span above it."""
    names = {span.context.span_id: span.name for _, span in trace}
    return {
        (service, span.name, names.get(span.parent_id, "-" if not span.parent_id else "?")) for service, span in trace
    }


async def test_a_trajectory_is_one_trace_of_four_services(
    valkey_url: str, tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    with receiver() as collector:
        config = run_of(valkey_url, tmp_path, "run.updates=2", f'traces.endpoint="{collector.endpoint}"')
        loop = Loop(config, {service: connect(config, service) for service in SERVICES})
        trained = await loop.run(valkey_url, tiny_checkpoints[0], tmp_path)
        await all_closed(loop.tracers)

    assert len(trained) == 2
    for trajectory_id in trained:
        trace = collector.trace(trajectory_id.replace("-", ""))
        assert shape(trace) == {
            ("sao-rollout", "episode", "-"),
            ("sao-rollout", "generate", "episode"),
            ("sao-rollout", "environment", "episode"),
            ("sao-rollout", "publish", "episode"),
            ("sao-ingest", "ingest.publish", "publish"),
            ("sao-reward", "queue", "episode"),
            ("sao-reward", "score", "episode"),
            ("sao-reward", "component", "score"),
            ("sao-trainer", "consume", "episode"),
            ("sao-trainer", "train", "episode"),
        }, "\n".join(tree(trace))
        by_name = {span.name: span for _, span in trace}
        assert [span.failure for _, span in trace if span.failure] == []
        assert by_name["episode"].attributes["task"] == "count"
        assert by_name["generate"].attributes["version"] == ROOT
        assert by_name["ingest.publish"].attributes["outcome"] == "accepted"
        assert by_name["score"].attributes["reward"] == by_name["train"].attributes["reward"]
        assert by_name["consume"].attributes == {"outcome": "taken", "lag": by_name["train"].attributes["lag"]}
        (update,) = by_name["train"].links
        linked = [span for _, span in collector.spans if span.context == update]
        assert [(one.name, one.links) for one in linked] == [("update", (by_name["train"].context,))]
    versions = [span for _, span in collector.spans if span.name == "version"]
    assert ROOT in {span.attributes["version"] for span in versions}
    assert not any(MARKER.encode() in request for request in collector.requests)


async def test_a_collector_that_never_answers_changes_nothing_of_the_run(
    valkey_url: str, tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:
        endpoint = f"http://127.0.0.1:{hole.getsockname()[1]}"
        config = run_of(valkey_url, tmp_path, "run.updates=2", f'traces.endpoint="{endpoint}"', "traces.queue_spans=2")
        loop = Loop(config, {service: connect(config, service) for service in SERVICES})
        trained = await loop.run(valkey_url, tiny_checkpoints[0], tmp_path)
        began = time.monotonic()
        await asyncio.gather(*(tracer.close() for tracer in loop.tracers.values()))

    assert len(trained) == 2
    assert time.monotonic() - began < 3.0


def named(tracer: MemoryTracer, name: str) -> list[Recorded]:
    return [span for span in tracer.spans if span.name == name]


@pytest.fixture
async def ingest() -> AsyncIterator[Ingest]:
    async with memory_ingest() as found:
        yield found


async def test_what_breaks_with_a_text_tells_only_its_kind(tmp_path: Path) -> None:
    """An engine's, an environment's and a scorer's errors hold what the model wrote."""

    class BreakingEpisode(TellingEpisode):
        def observe(self, action_token_ids: Sequence[int]) -> Observation:
            raise RuntimeError(MARKER)

    class BreakingTask(TellingTask):
        def episode(self, prompt: Prompt, tokenizer: Tokenizer) -> Episode:
            return (BreakingEpisode if prompt.id == "p0" else TellingEpisode)(prompt)

        def score(self, trajectory: Trajectory, tokenizer: Tokenizer) -> Mapping[str, float]:
            raise RuntimeError(MARKER)

    with receiver() as collector:
        config = load_run_config(None, [f'traces.endpoint="{collector.endpoint}"'], env={})
        tracer = connect(config, "rollout")
        stores = memory_stores()
        await stores.board.put_preference(CountTask.default_preference)
        settings = ["ingest.max_message_mb=1", "ingest.max_tokens=512", f'run.dir="{tmp_path}"']
        run = load_run_config(None, [*settings, "reward.max_deliveries=1"], env={})
        async with serving(run, stores.streams, stores.board, stores.ledger, tracer=tracer) as ingest:
            await write_engine(stores.board, "engine-0")
            parts = wire(
                run,
                BreakingTask(),
                NO_TOKENIZER,
                board=stores.board,
                streams=stores.streams,
                health=Health(60.0),
                tracer=tracer,
            )
            stop = asyncio.Event()
            consuming = asyncio.ensure_future(parts.consumer.run(stop))
            engine = MemoryEngine("engine-0", 32, policy=lambda _: {STOP: 1.0}, version=ROOT)
            async with working(
                ingest, {"engine-0": engine}, tmp_path, concurrency=1, plays=BreakingTask(), tracer=tracer
            ):
                await eventually(lambda: _buried(stores.streams), what="a dead letter")
            with pytest.raises(grpc.aio.AioRpcError, match="sampling"):
                await ingest.stub.Publish(refused_request(), timeout=10, metadata=(("traceparent", MARKER),))
            stop.set()
            await consuming
        await tracer.close()

    failures = {(span.name, span.failure) for _, span in collector.spans if span.failure}
    assert failures == {
        ("environment", "RuntimeError"),
        ("score", "invalid"),
        ("component", "infra_failed"),
        ("score", "infra_failed"),
        ("ingest.publish", "RefusedError"),
    }
    assert not any(MARKER.encode() in request for request in collector.requests)


async def _buried(streams: TrajectoryStreams) -> bool:
    return len(await streams.dead_letters(count=2)) == 2


def refused_request() -> pb.PublishRequest:
    message = good(random.Random(0))
    message.worker_id = message.prompt_id = MARKER
    message.sampling.temperature = 0.0
    return pb.PublishRequest(trajectory=message)


async def test_a_wait_for_feedback_is_a_span_and_holds_neither_author_nor_reason(tmp_path: Path) -> None:
    tracer = MemoryTracer()
    stores = memory_stores()
    await stores.board.put_preference(LIKED)
    settings = FeedbackSection(component="feedback", deadline_s=600.0)
    reception = Reception(
        stores.streams, stores.board, settings, tmp_path, now_s=time.time(), task=always(), tracer=tracer
    )
    message = good(random.Random(0))
    place = f"00-{message.id.replace('-', '')}-{'1' * 16}-01"
    await stores.streams.append(
        message.id, message.SerializeToString(), ordinal=0, sample=0, fields={"traceparent": place}
    )
    await reception.consume()
    async with reception.client() as client:
        answer = await post(client, message.id, 0.75, author=MARKER, reason=MARKER)
    assert answer.status_code == 200, answer.text

    (score,), (feedback,) = named(tracer, "score"), named(tracer, "feedback")
    assert score.attributes["outcome"] == "waits"
    assert feedback.attributes == {"outcome": "joined"}
    assert feedback.context.trace_id == message.id.replace("-", "")
    assert feedback.parent_id == score.parent_id == "1" * 16
    assert MARKER not in repr(tracer.spans)


async def test_each_scoring_of_a_redelivery_is_a_span_of_its_own(tmp_path: Path) -> None:
    tracer, stores = MemoryTracer(), memory_stores()
    await stores.board.put_preference(CountTask.default_preference)

    class Once(CountTask):
        failures = 1

        def score(self, trajectory: Trajectory, tokenizer: Tokenizer) -> Mapping[str, float]:
            if self.failures:
                self.failures -= 1
                raise ConnectionError
            return super().score(trajectory, tokenizer)

    config = load_run_config(None, [f'run.dir="{tmp_path}"', "reward.claim_idle_s=0.05"], env={})
    parts = wire(
        config, Once(), NO_TOKENIZER, board=stores.board, streams=stores.streams, health=Health(60.0), tracer=tracer
    )
    trajectory_id = uuid7()
    message = good(random.Random(0))
    message.id = trajectory_id
    message.finish_reason = trajectory_pb2.FINISH_REASON_STOP
    await stores.streams.append(trajectory_id, message.SerializeToString(), ordinal=0, sample=0, fields={})
    stop = asyncio.Event()
    consuming = asyncio.ensure_future(parts.consumer.run(stop))
    await eventually(lambda: len(named(tracer, "score")) == 2, what="the second scoring")
    stop.set()
    await consuming

    first, second = named(tracer, "score")
    assert [(one.attributes["attempt"], one.attributes["outcome"]) for one in (first, second)] == [
        (1, "infra_failed"),
        (2, "scored"),
    ]
    assert first.context.trace_id == second.context.trace_id == trajectory_id.replace("-", "")
    assert first.context.span_id != second.context.span_id
    assert first.failure == "infra_failed"
    assert second.failure == ""


async def test_ingest_tells_duplicates_and_refusals_apart(tmp_path: Path) -> None:
    tracer, stores = MemoryTracer(), memory_stores()
    config = load_run_config(None, ["ingest.max_message_mb=1", "ingest.max_tokens=512"], env={})
    async with serving(config, stores.streams, stores.board, stores.ledger, tracer=tracer) as ingest:
        request = pb.PublishRequest(trajectory=good(random.Random(0), ingest.limits))
        for _ in range(2):
            await ingest.stub.Publish(request, timeout=10)
        request.trajectory.run = MARKER
        with pytest.raises(grpc.aio.AioRpcError, match="run"):
            await ingest.stub.Publish(request, timeout=10)

    assert [(one.attributes["outcome"], one.failure) for one in named(tracer, "ingest.publish")] == [
        ("accepted", ""),
        ("duplicate", ""),
        ("refused", "RefusedError"),
    ]
    assert MARKER not in repr(tracer.spans)


async def test_a_spooled_trajectory_keeps_its_trace(ingest: Ingest, tmp_path: Path) -> None:
    """What another process offers later hangs below the root that the first one made."""
    tracer = MemoryTracer()
    request = pb.PublishRequest(trajectory=good(random.Random(0), ingest.limits))
    trace_id = request.trajectory.id.replace("-", "")
    request.trajectory.traceparent = f"00-{trace_id}-{'1' * 16}-01"
    spool = await open_spool(tmp_path)
    await spool.put(request)
    publisher = Publisher(ingest.stub, spool=spool, attempts=1, call_timeout_s=5.0, tracer=tracer)
    await publisher.replay()
    spool.close()

    (published,) = named(tracer, "publish")
    assert (published.context.trace_id, published.parent_id) == (trace_id, "1" * 16)
    assert published.attributes == {"outcome": "accepted"}
