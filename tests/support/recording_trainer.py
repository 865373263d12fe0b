"""The null trainer, which writes the id of everything that it settles to `<run.dir>/settled`, one a line.

`python -m tests.support.recording_trainer --config RUN.toml`
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from bench.soak import null_trainer
from sao.config import RunConfig
from sao.process import run_service
from services.trainer.consumer import Consumer


def settled_file(config: RunConfig) -> Path:
    return config.run.dir / "settled"


async def serve(config: RunConfig, stop: asyncio.Event) -> None:
    """The null trainer's, recorded."""

    class Recording(Consumer):
        async def settle(self, trajectory_ids: Iterable[str]) -> int:
            ids = list(trajectory_ids)
            gone = await super().settle(ids)
            with settled_file(config).open("a", encoding="utf-8") as file:
                file.writelines(f"{one}\n" for one in ids)
            return gone

    setattr(null_trainer, "Consumer", Recording)  # noqa: B010  # what it makes its consumer of, re-exported nowhere
    await null_trainer.serve(config, stop)


def settled(config: RunConfig) -> list[str]:
    """Ids in the order in which they were settled, each as often as it was."""
    file = settled_file(config)
    return file.read_text(encoding="utf-8").split() if file.exists() else []


if __name__ == "__main__":
    run_service("trainer", serve)
