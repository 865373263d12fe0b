"""Wires the rollout worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc.aio

from sao import board as boards
from sao.board.base import EngineFacts
from sao.config import RunConfig
from sao.endings import end
from sao.forgetting import spool_root
from sao.retention import Duty, Retention, in_thread
from sao.routing import RoutingShape, replayed_routing
from sao.tasks import load_task
from sao.tasks.prompts import load_prompts, prompt_for
from sao.telemetry import traces
from sao.telemetry.health import Health
from sao.telemetry.http import TelemetryServer
from sao.telemetry.metrics import watch_disk
from sao.tokenizer import FileTokenizer
from sao.weights.filesystem import FileSystemVersionStore
from services.rollout import metrics
from services.rollout.checkpoint import TOKENIZER_FILE, first_checkpoint, vocabulary_size
from services.rollout.engines.base import Engine
from services.rollout.engines.sglang import SGLangEngine
from services.rollout.episode import EpisodeLimits, EpisodeRunner
from services.rollout.folder import TrajectoryFolder
from services.rollout.ingest_client import call_metadata, make_stub, open_channel
from services.rollout.publisher import Publisher
from services.rollout.retention import erase_files
from services.rollout.rotation import Rotation
from services.rollout.spool import SET_ASIDE_SUFFIX, Spool
from services.rollout.worker import Worker


async def main(config: RunConfig, stop: asyncio.Event) -> None:
    """Run one worker until `stop`."""
    health = Health(stalled_after_s=config.ingest.episode_deadline_s + config.rollout.turn_timeout_s)
    # Where ingest binds, metrics bind: a run on loopback shows nothing to the network.
    telemetry = TelemetryServer(health, config.ingest.bind, config.rollout.metrics_port)
    telemetry.start()
    tracer = traces.connect(config, "rollout")
    board = boards.connect(config)
    try:
        store = FileSystemVersionStore(config.versions_dir, min_free_bytes=0)
        health.idle("waiting for the first weight version")
        checkpoint = await first_checkpoint(store, board, stop)
        if checkpoint is None:
            return
        vocab_size, routing = vocabulary_size(checkpoint), replayed_routing(config, checkpoint)
        tokenizer = FileTokenizer(checkpoint / TOKENIZER_FILE)
        engines = _engines(config, vocab_size, routing)
        rotation = Rotation(board, engines, connect=_connect(config, vocab_size, routing))
        spool = make_spool(config)
        await spool.open()
        async with open_channel(config) as channel:
            worker, publisher = _worker(
                config, channel, rotation, tokenizer, health, spool=spool, routing=routing, tracer=tracer
            )
            health.set_ready(True)
            try:
                async with retention_of(config).beside(), asyncio.TaskGroup() as group:
                    background = [
                        group.create_task(rotation.run()),
                        group.create_task(publisher.keep_replaying()),
                    ]
                    await worker.run(stop)
                    await end(background)
            finally:
                spool.close()
                await rotation.close()
    finally:
        await board.close()
        await tracer.close()
        telemetry.close()


def _engines(config: RunConfig, vocab_size: int, routing: RoutingShape | None) -> dict[str, Engine]:
    key = config.engine.api_key.get_secret_value() if config.engine.api_key else None
    named = {f"engine-{index}": url for index, url in enumerate(config.engine.urls)}
    return {name: SGLangEngine(name, url, vocab_size, routing=routing, api_key=key) for name, url in named.items()}


def _connect(
    config: RunConfig, vocab_size: int, routing: RoutingShape | None
) -> Callable[[EngineFacts], Engine] | None:
    """What makes a client for an engine that the board names, where the run file names none."""
    if config.engine.discovery == "static":
        return None
    key = config.engine.api_key.get_secret_value() if config.engine.api_key else None
    return lambda facts: SGLangEngine(facts.engine_id, facts.url, vocab_size, routing=routing, api_key=key)


def retention_of(config: RunConfig) -> Retention:
    """What erases files that are over their time; any number of workers may look at one folder."""
    keep, spools = config.retention, spool_root(config)
    duties = [
        Duty("dead_folder", keep.dead_folder_h, in_thread(partial(erase_files, config.run.dir / "dead", "*"))),
        Duty("set_aside", keep.set_aside_h, in_thread(partial(erase_files, spools, f"*/*{SET_ASIDE_SUFFIX}"))),
    ]
    return Retention(duties, metrics.RETENTION)


def make_spool(config: RunConfig) -> Spool:
    """The worker's spool, closed, and behind it the run's dead folder."""
    max_bytes = config.rollout.spool_mb * 2**20
    metrics.SPOOL_LIMIT.set(max_bytes)
    watch_disk("spool", spool_folder(config))
    return Spool(spool_folder(config), dead=TrajectoryFolder(config.run.dir / "dead"), max_bytes=max_bytes)


def spool_folder(config: RunConfig) -> Path:
    """The worker's own: only one process at a time may hold it."""
    return spool_root(config) / config.rollout.worker_id


def _worker(
    config: RunConfig,
    channel: grpc.aio.Channel,
    rotation: Rotation,
    tokenizer: FileTokenizer,
    health: Health,
    *,
    spool: Spool,
    routing: RoutingShape | None,
    tracer: traces.Tracer,
) -> tuple[Worker, Publisher]:
    rollout = config.rollout
    task = load_task(config.task.name)
    prompts = load_prompts(config.task.prompts or task.prompts_path)
    stub = make_stub(channel)
    metadata = call_metadata(config)
    runner = EpisodeRunner(
        run=config.run.name,
        worker_id=rollout.worker_id,
        task=task,
        tokenizer=tokenizer,
        prompt_of=lambda ordinal: prompt_for(prompts, ordinal, config.run.seed),
        rotation=rotation,
        limits=EpisodeLimits(
            max_turns=rollout.max_turns,
            max_new_tokens=rollout.max_new_tokens,
            max_tokens=rollout.max_tokens,
            turn_timeout_s=rollout.turn_timeout_s,
        ),
        routing=routing,
        salted=config.weights.mode == "in_place",
        tracer=tracer,
    )
    call_timeout_s = 2 * config.redis.timeout_s
    publisher = Publisher(
        stub,
        spool=spool,
        attempts=rollout.publish_attempts,
        call_timeout_s=call_timeout_s,
        metadata=metadata,
        tracer=tracer,
    )
    worker = Worker(
        rollout.worker_id,
        stub=stub,
        runner=runner,
        rotation=rotation,
        publisher=publisher,
        health=health,
        concurrency=rollout.concurrency,
        renew_every_s=config.ingest.lease_ttl_s / 3,
        call_timeout_s=call_timeout_s,
        drain_s=rollout.drain_s,
        metadata=metadata,
    )
    return worker, publisher
