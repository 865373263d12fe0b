"""When an engine was first verified to serve a version: a line in the run's folder, and the last switch's time.

Neither holds anything up: a disk that refuses is counted, a board that does not answer costs one measurement.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from sao.adaptation import FirstUse, Served, note_served
from sao.board.base import Board
from sao.streams.base import StreamUnavailableError
from sao.telemetry.logs import get_logger
from sao.weights.manifest import Manifest
from services.weights import metrics

log = get_logger(__name__)


class Servings:
    """Of one run; without a folder no line is written."""

    def __init__(self, board: Board, run_dir: Path | None, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._board = board
        self._run_dir = run_dir
        self._wall_clock = wall_clock
        self._first_use = FirstUse(wall_clock)

    async def note(self, engine_id: str, manifest: Manifest) -> None:
        """An engine serves this version from now on."""
        if self._run_dir is not None:
            served = Served(version=manifest.version, engine=engine_id, at_s=self._wall_clock())
            try:
                await asyncio.to_thread(note_served, self._run_dir, served)
            except OSError as error:
                metrics.NOT_NOTED.inc()
                log.warning("not noted in served.jsonl", version=manifest.version, reason=str(error))
        if manifest.preference:
            await self._measure(manifest.preference)

    async def _measure(self, version: int) -> None:
        try:
            preference = await self._board.preference(version)
        except StreamUnavailableError as error:
            log.warning("the time of a preference could not be read", preference=version, reason=str(error))
            return
        if preference is not None and (seconds := self._first_use.seconds(preference)) is not None:
            metrics.ADAPTATION.set(seconds)
