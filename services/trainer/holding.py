"""Publishing is held while a guard is tripped; whoever reads the log is told why, and what to do.

Training goes on and so do rollouts, from the last published version: from trainer.max_lag updates on they are stale and
dropped, and the trainer then waits (docs/algorithm.md, "Guards").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sao.config.schema import GuardsSection
from sao.telemetry.logs import get_logger
from services.trainer import metrics
from services.trainer.checkpoint import CheckpointStore
from services.trainer.core.guards import GUARD_NAMES, Guards, Trip

log = get_logger(__name__)


class Holding:
    """The guards of a run, with what is said and counted when one trips or clears."""

    def __init__(self, settings: GuardsSection, checkpoints: CheckpointStore) -> None:
        self._guards = Guards(settings)
        self._window = settings.window
        self._checkpoints = checkpoints
        self._told: set[str] = set()

    @property
    def memory(self) -> int:
        """Policy updates that `recall` needs, at most."""
        return self._guards.memory

    @property
    def reasons(self) -> list[str]:
        """Guard, value and limit of each that is tripped; publishing is held while there are any."""
        return [str(trip) for trip in self._guards.tripped]

    def recall(self, earlier: Iterable[Mapping[str, float]], *, update: int, version: str) -> None:
        """Begin with the metrics of earlier policy updates, oldest first, the last of which is `update`."""
        for numbers in earlier:
            self._guards.observe(numbers)
        self._tell(update, version)

    def observe(self, numbers: Mapping[str, float], *, update: int, version: str) -> None:
        """Judge after policy update `update`, while `version` is the newest published."""
        self._guards.observe(numbers)
        self._tell(update, version)

    def _tell(self, update: int, version: str) -> None:
        tripped = {trip.guard: trip for trip in self._guards.tripped}
        for name in GUARD_NAMES:
            metrics.GUARD_HOLDS.labels(name).set(name in tripped)
        for name in sorted(tripped.keys() - self._told):
            self._tell_trip(tripped[name], update, version)
        for name in sorted(self._told - tripped.keys()):
            log.info("guard cleared", guard=name, update=update, publishing="held" if tripped else "goes on")
        self._told = set(tripped)

    def _tell_trip(self, trip: Trip, update: int, version: str) -> None:
        before = [kept for kept in self._checkpoints.updates() if kept <= update - self._window]
        back = f"the checkpoint of update {before[-1]}" if before else "a fresh run folder: no checkpoint is old enough"
        log.error(
            "publishing held",
            guard=trip.guard,
            value=trip.value,
            limit=trip.limit,
            unit=trip.unit,
            update=update,
            serving=version,
            cause=trip.advice,
            to_do=f"stop, change that setting and go back to {back} (move the newer ones away); or, if this is what "
            f"you want, raise guards.{trip.guard} or set it to off, and start again",
        )
