"""Wires the trainer: backend, stream, board, stores, loop. `python -m services.trainer --config RUN.toml`.

With `trainer.ranks` above 1 this process is rank 0 and starts the others itself; under
`torchrun --nproc-per-node N -m services.trainer --config RUN.toml` each process finds its rank in its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

import sao.board
import sao.streams
from sao.archive import Archive
from sao.board.base import Board, TrainerFacts, TrainerState
from sao.config import ConfigError
from sao.config.schema import RunConfig
from sao.invariants import Limits
from sao.process import run_service
from sao.retention import Duty, Retention, in_thread
from sao.routing import replayed_routing
from sao.slots import Slots
from sao.streams.base import TrajectoryStreams
from sao.tasks import load_task
from sao.tasks.prompt_files import load_prompts
from sao.telemetry import traces
from sao.telemetry.health import Health
from sao.telemetry.http import TelemetryServer
from sao.telemetry.logs import get_logger
from sao.tokenizer import FileTokenizer
from sao.weights.base import VersionStore
from sao.weights.filesystem import FileSystemVersionStore
from services.trainer import metrics
from services.trainer.backends.base import TrainingBackend
from services.trainer.batcher import batcher_of
from services.trainer.canary import canary_sequences, sequences_for
from services.trainer.checkpoint import Checkpoint, CheckpointStore, Progress
from services.trainer.consumer import Consumer
from services.trainer.core.baselines import reward_range
from services.trainer.core.update import Update, UpdateSettings
from services.trainer.drops import FILE, Drops, let_go
from services.trainer.launch import own_rank, started_followers
from services.trainer.loop import Parts, TrainerLoop, fresh_progress
from services.trainer.outage import ride_out
from services.trainer.publisher import Publisher, roll_back
from services.trainer.ranks import Ranks, follow
from services.trainer.recovery import lost_work, never_again, undone
from services.trainer.restoring import ANNOUNCED_FILE, claim_store
from services.trainer.retention import ArchiveRetention
from services.trainer.warm_start_key import initial_model_path

log = get_logger(__name__)


def main() -> NoReturn:
    """Entry point of the process."""
    run_service("trainer", serve)


async def serve(config: RunConfig, stop: asyncio.Event) -> None:
    """Train until the run's last update or until `stop`."""
    if config.trainer.device != "cuda":
        torch.set_num_threads(1)
    torch.manual_seed(config.run.seed + own_rank())
    if own_rank() > 0:
        _follow(config)
        return
    metrics.show_settings(config)
    health = Health(config.trainer.starvation_timeout_s)
    telemetry = TelemetryServer(health, config.ingest.bind, config.trainer.metrics_port)
    log.info("telemetry", port=telemetry.start())
    try:
        tracer = traces.connect(config, "trainer")
        async with _stores(config) as (streams, board):
            try:
                await _train(config, stop, streams, board, health, tracer=tracer)
            finally:
                await tracer.close()
    finally:
        telemetry.close()


async def _train(
    config: RunConfig,
    stop: asyncio.Event,
    streams: TrajectoryStreams,
    board: Board,
    health: Health,
    *,
    tracer: traces.Tracer,
) -> None:
    checkpoints = CheckpointStore(
        config.run.dir / "checkpoints",
        config.run.name,
        config.checkpoint.keep_last,
        config.checkpoint.keep_every,
        config.checkpoint.free_space_mb << 20,
    )
    restored = checkpoints.newest()
    store = FileSystemVersionStore(config.versions_dir, config.checkpoint.free_space_mb << 20)
    archive = Archive(config.run.dir / "archive")
    archive.finish_forgetting()
    progress = restored.progress if restored is not None else fresh_progress(config.run.name)
    again = undone(archive, progress, config.samples)
    claim = await claim_store(
        config.run.dir,
        board=board,
        streams=streams,
        store=store,
        archive=archive,
        done=never_again(progress, again.values()),
        samples=config.samples,
        horizon_h=config.ingest.seen_horizon_h,
    )
    retention = retention_of(config, archive, checkpoints, progress, claim.epoch)
    await roll_back(board, store)
    refuse_another_algorithm(progress, config)
    over = config.run.updates is not None and progress.update >= config.run.updates
    if over and published(store, progress, await ride_out(board.versions)):
        await ride_out(lambda: board.write_trainer(_finished(progress, claim.epoch, store.names()[-1])))
        await retention.once()
        log.info("the run is over already", update=progress.update, updates=config.run.updates)
        return
    initial = _initial_model(config)
    drops = Drops.of(config.run.dir, claim.epoch, progress.dropped)
    consumer = Consumer(
        streams,
        board,
        config.trainer,
        model_limits(config, initial),
        epoch=claim.epoch,
        restored=[] if claim.emptied else progress.unsettled_ids,
        forgone=progress.forgone_ids,
        undone=again,
        done=Slots(progress.done),
        drops=drops,
        defer_consumed=config.algorithm.synchronous,
        reward_range=reward_range(config),
        tracer=tracer,
    )
    consumer.requeue(await lost_work(archive, progress, streams, drops.let_go()))
    publisher = Publisher(
        store=store,
        board=board,
        run=config.run.name,
        epoch=claim.epoch,
        initial=initial,
        canary=task_canary(config, initial),
        keep_versions=config.weights.keep_versions,
        announced=config.run.dir / ANNOUNCED_FILE,
    )
    with started_followers(config.trainer.ranks), _ranks(config, initial) as ranks:
        if restored is not None:
            ranks.load(restored.backend_dir)
        log.info("state", update=progress.update, restored=_place(restored), epoch=claim.epoch)
        batcher = batcher_of(config, consumer)
        parts = Parts(
            config,
            ranks,
            streams,
            board,
            consumer,
            batcher,
            publisher,
            checkpoints,
            archive,
            health,
            claim.epoch,
            tracer,
        )
        async with retention.beside():
            await TrainerLoop(parts, progress).run(stop)


def retention_of(
    config: RunConfig, archive: Archive, checkpoints: CheckpointStore, begun: Progress, epoch: int
) -> Retention:
    """What erases archived text that is over its time, in the process of this epoch, which began there."""
    dropped = partial(let_go, config.run.dir / FILE)
    erase = ArchiveRetention(archive, checkpoints, dropped, begun=begun, epoch=epoch).erase
    return Retention([Duty("archive", config.retention.archive_h, in_thread(erase))], metrics.RETENTION)


def published(store: VersionStore, progress: Progress, announced: Collection[str]) -> bool:
    """Whether the newest version holds the last update, for all to know: not while a guard held it."""
    newest = store.names()[-1:]
    return bool(newest) and newest[0] in announced and store.manifest(newest[0]).update >= progress.update


@contextlib.contextmanager
def _ranks(config: RunConfig, initial: Path) -> Iterator[Ranks]:
    backend = new_backend(config, initial)
    ranks = Ranks(backend, Update(backend, UpdateSettings.of(config)))
    try:
        yield ranks
    finally:
        ranks.stop()
        backend.close()


def new_backend(config: RunConfig, initial: Path) -> TrainingBackend:
    """DeepSpeed, imported only here: it takes seconds."""
    from services.trainer.backends.deepspeed import DeepSpeedBackend

    return DeepSpeedBackend(config, initial)


def refuse_another_algorithm(progress: Progress, config: RunConfig) -> None:
    """ConfigError when this state was made by another algorithm: its critic and baseline would be read as one's own."""
    made_by = progress.algorithm or "sao"
    found = config.trainer.algorithm
    if progress.update + progress.critic_only > 0 and made_by != found:
        message = f"the newest checkpoint is one of {made_by}, found {found}: name another run.dir, or {made_by}"
        raise ConfigError(key="trainer.algorithm", message=message)


def model_limits(config: RunConfig, initial: Path) -> Limits:
    """What a trajectory may hold for this model."""
    model = json.loads((initial / "config.json").read_bytes())
    return Limits(
        run=config.run.name,
        vocab_size=int(model["vocab_size"]),
        max_tokens=config.ingest.max_tokens,
        max_bytes=config.ingest.max_message_mb << 20,
        logprob_tolerance=config.ingest.logprob_tolerance,
        routing=replayed_routing(config, initial),
        samples=config.samples,
    )


def task_canary(config: RunConfig, initial: Path) -> list[list[int]]:
    """The run's canary, from the first prompts of its task."""
    task = load_task(config.task.name)
    tokenizer = FileTokenizer(initial / "tokenizer.json")
    count = sequences_for(config.engine.dtype)
    prompts = load_prompts(config.task.prompts or task.prompts_path)[:count]
    ids = [task.episode(prompt, tokenizer).prompt_token_ids for prompt in prompts]
    return canary_sequences(ids, tokenizer.vocab_size, config.run.seed, count=count)


def _initial_model(config: RunConfig) -> Path:
    """The initial policy's checkpoint; a missing warm start is made here."""
    path = initial_model_path(config)
    if not (path / "config.json").exists():
        if config.model.path is not None:
            raise ConfigError(
                key="model.path", message=f"{path} holds no config.json: expected a Hugging Face checkpoint"
            )
        from services.trainer.warm_start import warm_start

        log.info("no warm start in the cache, training one", path=str(path))
        warm_start(config, path, lambda step, steps, loss: log.info("warm start", step=step, steps=steps, loss=loss))
    return path


def _follow(config: RunConfig) -> None:
    backend = new_backend(config, _initial_model(config))
    try:
        follow(backend, Update(backend, UpdateSettings.of(config)))
    finally:
        backend.close()


def _finished(progress: Progress, epoch: int, version: str) -> TrainerFacts:
    return TrainerFacts(
        epoch=epoch,
        update=progress.update,
        version=version,
        consumed=progress.consumed,
        state=TrainerState.FINISHED,
    )


def _place(restored: Checkpoint | None) -> str:
    return str(restored.path) if restored is not None else "initial model"


@contextlib.asynccontextmanager
async def _stores(config: RunConfig) -> AsyncIterator[tuple[TrajectoryStreams, Board]]:
    streams = sao.streams.connect(config)
    board = sao.board.connect(config)
    try:
        yield streams, board
    finally:
        await streams.close()
        await board.close()
