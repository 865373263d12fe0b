"""A trainer without a model, `python -m bench.soak.null_trainer --config RUN.toml`: takes what is scored as the real
one does, and settles it an update at a time.
"""

from __future__ import annotations

import asyncio

import sao.board
import sao.streams
from sao.config import RunConfig
from sao.process import run_service
from sao.telemetry.health import Health
from sao.telemetry.http import TelemetryServer
from sao.weights.filesystem import FileSystemVersionStore
from services.trainer.app import model_limits
from services.trainer.consumer import Consumer, Position, Taken

POLL_MS = 200


async def serve(config: RunConfig, stop: asyncio.Event) -> None:
    """Consume until `stop`; what is left over when nothing more comes is settled, as a starved trainer does."""
    health = Health(config.trainer.starvation_timeout_s)
    telemetry = TelemetryServer(health, config.ingest.bind, config.trainer.metrics_port)
    telemetry.start()
    streams, board = sao.streams.connect(config), sao.board.connect(config)
    store = FileSystemVersionStore(config.versions_dir, 0)
    version = store.names()[-1]
    consumer = Consumer(
        streams,
        board,
        config.trainer,
        model_limits(config, store.path(version)),
        epoch=await board.new_trainer_epoch(),
    )
    await consumer.open()
    health.set_ready(True)
    taken: list[Taken] = []
    while not stop.is_set():
        found = await consumer.take(Position(version, 0), block_ms=POLL_MS)
        health.progress()
        if isinstance(found, Taken):
            taken.append(found)
        if taken and (found is None or len(taken) == config.trainer.trajectories_per_update):
            await consumer.settle([one.trajectory.id for one in taken])
            taken.clear()
            consumer.begin_update()
    await streams.close()
    await board.close()
    telemetry.close()


if __name__ == "__main__":
    run_service("trainer", serve)
