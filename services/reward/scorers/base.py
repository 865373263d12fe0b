"""The scorer boundary: named raw components of one trajectory, from whatever computes them.

What every implementation keeps, and tests/contract/test_scorers.py checks on all of them:

- `score` gives every one of `components`, each a finite number, or raises: never a number for what failed.
- UnscorableError: this trajectory can never be scored. DeadlinePassedError: `deadline_s` passed since the call began to
  be worked on. Anything else: it failed for a reason outside the trajectory, and may pass.
- At most `concurrency` calls are worked on at a time; others wait for their turn, which does not count.
- The event loop is never blocked, and a call whose wait is cancelled leaves nothing behind but a thread that ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sao.preference import PreferenceDocument
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from services.reward.pool import DeadlinePassedError

__all__ = [
    "ComponentScorer",
    "DeadlinePassedError",
    "ScorerFailedError",
    "ScoringRequest",
    "checked",
    "mapping_of",
    "number_of",
]


class ScorerFailedError(Exception):
    """The scorer failed for a reason outside the trajectory; the message says which."""


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """What a scorer may look at."""

    trajectory: Trajectory
    tokenizer: Tokenizer
    document: PreferenceDocument
    """What is rewarded; a judge reads its rubric."""


class ComponentScorer(Protocol):
    """Computes some components of a trajectory."""

    name: str
    """In errors, metrics and logs."""
    kind: str
    components: Mapping[str, str]
    """A description for people of each component it computes."""
    deadline_s: float
    concurrency: int
    judges: bool
    """Whether what it computes depends on the preference's rubric."""
    bounds: tuple[float, float] | None
    """Least and most that a component can be, where that is declared."""

    async def score(self, request: ScoringRequest) -> Mapping[str, float]: ...

    async def close(self) -> None: ...


def checked(found: Mapping[str, object], components: Mapping[str, str]) -> dict[str, float]:
    """`found` as numbers; ScorerFailedError unless it has exactly these components and each is a finite number."""
    if found.keys() != components.keys():
        msg = f"gave the components {sorted(map(str, found))}, the run file declares {sorted(components)}"
        raise ScorerFailedError(msg)
    return {name: number_of(name, value) for name, value in found.items()}


def mapping_of(found: object) -> dict[str, Any]:
    """What a user's code gave, whose values nobody has looked at; ScorerFailedError when it is no mapping."""
    if not isinstance(found, Mapping):
        msg = f"gave {type(found).__name__}, expected a mapping from component to number"
        raise ScorerFailedError(msg)
    return dict(found)


def number_of(name: str, value: object) -> float:
    """The component of this name as a finite number; ScorerFailedError when it is none: a bool, a text, NaN."""
    if isinstance(value, bool):
        msg = f"{name} is {value}, expected a number"
        raise ScorerFailedError(msg)
    try:
        number = float(value)  # type: ignore[arg-type]  # what is none is refused below
    except Exception as error:  # OverflowError of a long int, RuntimeError of a tensor with two elements, ...
        msg = f"{name} is {_shown(value)}, expected a number"
        raise ScorerFailedError(msg) from error
    if isinstance(value, str) or not math.isfinite(number):
        msg = f"{name} is {_shown(value)}, expected a finite number"
        raise ScorerFailedError(msg)
    return number


def _shown(value: object) -> str:
    try:
        return f"{value!r:.100}"
    except Exception as error:  # noqa: BLE001 - Python writes no int of 4,301 digits; a user's object may refuse too
        return f"{type(value).__name__} that cannot be written ({type(error).__name__})"
