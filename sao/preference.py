"""What is rewarded now: a versioned document, and the pure function from raw components to a reward.

    value = clip(offset + sum_i weights[i] * component[i], low, high) * prod_g component[g]   (g in gates)

and `low` when any component named in `thresholds` lies below its threshold. Because an outcome keeps its
raw components, re-weighting under another preference is this arithmetic again, nothing is re-scored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Finite = Annotated[float, Field(allow_inf_nan=False)]
ComponentName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]


class MissingComponentError(KeyError):
    """A preference names a component that the outcome does not have: only re-scoring can supply it."""

    def __init__(self, missing: list[str], known: list[str]) -> None:
        self.missing = missing
        super().__init__(f"preference needs {missing}, the outcome has {known}: send the trajectory back for scoring")


class PreferenceDocument(BaseModel):
    """The body of PUT /v1/preferences."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """For people."""
    weights: Annotated[dict[ComponentName, Finite], Field(min_length=1)]
    """What each raw component adds to the reward."""
    offset: Finite = 0.0
    """Added to their sum."""
    low: Finite = 0.0
    """The sum is clipped to at least this, and the reward is this when a threshold is missed ..."""
    high: Finite = 1.0
    """... and to at most this."""
    gates: list[ComponentName] = []
    """Components that the clipped sum is multiplied by."""
    thresholds: dict[ComponentName, Finite] = {}
    """The least that a component must be."""

    @model_validator(mode="after")
    def _range(self) -> PreferenceDocument:
        if not self.low < self.high:
            msg = f"low {self.low} must lie below high {self.high}"
            raise ValueError(msg)
        return self

    @property
    def components(self) -> frozenset[str]:
        """Every component this preference reads."""
        return frozenset(self.weights) | frozenset(self.gates) | frozenset(self.thresholds)

    def value(self, components: Mapping[str, float]) -> float:
        """Reward of one trajectory with these raw components.

        Raises MissingComponentError when the preference reads a component that is not there, and
        ValueError when the result is not finite.
        """
        missing = sorted(self.components - components.keys())
        if missing:
            raise MissingComponentError(missing, sorted(components))
        if any(components[name] < least for name, least in self.thresholds.items()):
            return self.low
        total = self.offset + sum(weight * components[name] for name, weight in self.weights.items())
        value = min(max(total, self.low), self.high) * math.prod(components[gate] for gate in self.gates)
        if not math.isfinite(value):
            msg = f"preference {self.name!r} gives {value} for {dict(components)}"
            raise ValueError(msg)
        return value


Origin = Literal["initial", "put", "rollback", "schedule"]
"""What made a version: the run's start, a person or product, one of them repeating an older one, a scheduled switch."""


class Preference(BaseModel):
    """A preference document with the version it was stored under; versions count from 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    version: Annotated[int, Field(ge=1)]
    document: PreferenceDocument
    stored_s: float = 0.0
    """Unix seconds, by the store's clock, at which it became current; 0: stored by an earlier release."""
    author: str = ""
    reason: str = ""
    client: str = ""
    """Address of whoever asked for it; empty where nobody did."""
    origin: Origin = "put"
    restores: Annotated[int, Field(ge=1)] | None = None
    """The version that a rollback repeats."""
