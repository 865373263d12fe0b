"""When a version is due: by updates, and not too often."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Cadence:
    """Every `every` updates, at least `min_seconds` apart; but as soon as every token in flight is stale.

    With `min_seconds` a multiple of `every` that came too early is made up for at the first update that is not.
    """

    every: int
    min_seconds: float
    max_lag: int
    update: int
    """Of the last publication."""
    at: float
    """Monotonic seconds of the last publication."""

    def due(self, update: int, now: float) -> bool:
        """Whether the state after this update shall be published."""
        if not self.min_seconds:
            return update % self.every == 0
        passed = update // self.every > self.update // self.every
        return update - self.update > self.max_lag or (passed and now - self.at >= self.min_seconds)

    def published(self, update: int, now: float) -> None:
        """A version of this update is out."""
        self.update, self.at = update, now
