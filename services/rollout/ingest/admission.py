"""Whether more work may begin: the trainer's state, the store's memory, and the limit."""

from __future__ import annotations

import time
from collections.abc import Callable

from sao.board.base import Board, TrainerState
from sao.streams.base import TrajectoryStreams
from sao.v1 import ingest_pb2 as pb
from services.rollout.ingest import metrics


class Admission:
    """Answers from the board and the store; the memory reading is at most `max_age_s` old."""

    def __init__(
        self,
        streams: TrajectoryStreams,
        board: Board,
        *,
        back_pressure_at: float,
        max_age_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams = streams
        self._board = board
        self._back_pressure_at = back_pressure_at
        self._max_age_s = max_age_s
        self._clock = clock
        self._fraction = 0.0
        self._read_at = float("-inf")

    async def back_pressure(self) -> float | None:
        """The store's used share when it is at the mark or above; None while there is room."""
        if self._clock() - self._read_at >= self._max_age_s:
            self._fraction = await self._streams.memory_fraction()
            self._read_at = self._clock()
            metrics.STORE_MEMORY.set(self._fraction)
        return self._fraction if self._fraction >= self._back_pressure_at else None

    async def state(self) -> pb.AdmissionState.ValueType:
        """FINISHED, BACK_PRESSURE or OPEN; whether the limit is reached is the ledger's to know."""
        trainer = await self._board.trainer()
        if trainer is not None and trainer.state is TrainerState.FINISHED:
            return pb.ADMISSION_STATE_FINISHED
        if await self.back_pressure() is not None:
            return pb.ADMISSION_STATE_BACK_PRESSURE
        return pb.ADMISSION_STATE_OPEN


def show(state: pb.AdmissionState.ValueType) -> None:
    """Set the state's gauge to 1 and the others to 0."""
    for value in pb.AdmissionState.values()[1:]:
        name = pb.AdmissionState.Name(value).removeprefix("ADMISSION_STATE_").lower()
        metrics.ADMISSION.labels(name).set(1 if value == state else 0)
