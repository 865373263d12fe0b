"""Does the engine's arithmetic agree with the trainer's? Bounds on log-prob differences, in nats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from sao.atomic import write_file
from sao.weights.manifest import CanarySequence, Manifest

CALIBRATION_TOKENS = 512


class CanaryError(Exception):
    """The log-probs differ by more than rounding; says by how much and where."""


@dataclass(frozen=True)
class Exact:
    """float32: every difference at most `tolerance`."""

    tolerance: float

    def check(self, differences: Sequence[float]) -> None:
        worst = max(differences)
        if worst > self.tolerance:
            at = differences.index(worst)
            msg = f"log-prob {at} of {len(differences)} differs by {worst:.3g}, allowed {self.tolerance:.3g}"
            raise CanaryError(msg)

    def check_token(self, difference: float) -> None:
        self.check([difference])


class Calibrated(BaseModel):
    """bfloat16: mean and p99 at most 2 and 3 times those of the run's first version."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: float
    p99: float

    @classmethod
    def from_first(cls, differences: Sequence[float], ceiling: float) -> Calibrated:
        """Measure on the first version; CanaryError when there is too little, or the mean is above `ceiling`.

        Such a mean is a wrong layout, not rounding: a mixed model differs by about 0.8.
        """
        if len(differences) < CALIBRATION_TOKENS:
            msg = f"the canary has {len(differences)} log-probs, calibration in bfloat16 needs {CALIBRATION_TOKENS}"
            raise CanaryError(msg)
        found = cls(mean=math.fsum(differences) / len(differences), p99=percentile_99(differences))
        if found.mean > ceiling:
            msg = (
                f"mean log-prob difference {found.mean:.3g} on the first version, allowed {ceiling:.3g} "
                "(weights.canary_tolerance): no rounding, a wrong layout?"
            )
            raise CanaryError(msg)
        return found

    def check(self, differences: Sequence[float]) -> None:
        mean, p99 = math.fsum(differences) / len(differences), percentile_99(differences)
        if mean > 2 * self.mean or p99 > 3 * self.p99:
            msg = f"mean {mean:.3g} and p99 {p99:.3g}, allowed {2 * self.mean:.3g} and {3 * self.p99:.3g}"
            raise CanaryError(msg)

    def check_token(self, difference: float) -> None:
        if difference > 3 * self.p99:
            msg = f"generated token's log-prob differs by {difference:.3g}, allowed {3 * self.p99:.3g}"
            raise CanaryError(msg)


class CalibrateOnFirst:
    """bfloat16 before its first version: measures, keeps the result in `file`, and is a `Calibrated` from then on.

    `ceiling`: largest mean difference that the measurement accepts as rounding.
    """

    def __init__(self, file: Path, ceiling: float) -> None:
        self._file = file
        self._ceiling = ceiling
        self._bounds = Calibrated.model_validate_json(file.read_bytes()) if file.is_file() else None

    def check(self, differences: Sequence[float]) -> None:
        if self._bounds is None:
            self._bounds = Calibrated.from_first(differences, self._ceiling)
            write_file(self._file, self._bounds.model_dump_json().encode())
        self._bounds.check(differences)

    def check_token(self, difference: float) -> None:
        if self._bounds is not None:
            self._bounds.check_token(difference)


Tolerance = Exact | Calibrated | CalibrateOnFirst


def percentile_99(values: Sequence[float]) -> float:
    """Nearest-rank 99th percentile."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def differences(sequence: CanarySequence, found: Sequence[float]) -> list[float]:
    """|engine - trainer| per token; CanaryError when one is not a finite number."""
    if len(found) != len(sequence.logprobs) or not all(math.isfinite(value) for value in found):
        msg = f"{len(found)} log-probs {list(found)[:4]}..., expected {len(sequence.logprobs)} finite ones"
        raise CanaryError(msg)
    return [abs(mine - theirs) for mine, theirs in zip(found, sequence.logprobs, strict=True)]


def probe_prompt(manifest: Manifest) -> list[int]:
    """A prompt to have in the prefix cache before an update: the first canary's ids."""
    return list(manifest.canary[0].token_ids)
