"""What a proposed preference would have made of trajectories that were trained on: arithmetic, nothing is scored.

Both preferences are applied to the same raw components. What counts for learning is on which side of the mean a reward
lies (the sign of its advantage) and how far the rewards are apart, so that is what is compared.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from sao.outcome import known_to
from sao.preference import PreferenceDocument

BINS = 10
EXAMPLES = 10
"""Movers that are named."""
LARGEST = 1e100
"""A reward beyond this is as good as no number: sums of such are none."""
_SAME = 1e-9
"""Rewards closer to the mean than this share of their range count as neither above nor below."""


class _View(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Distribution(_View):
    """Rewards of the compared trajectories under one preference; None where there are none."""

    mean: float | None
    std: float | None
    """0: every advantage would be zero, and nothing would be learnt."""
    deciles: list[float]
    """Least, nine deciles, largest, each the nearest reward that there is; empty of nothing."""
    histogram: list[int]
    """Trajectories in each of the bins between `edges`."""


class Flips(_View):
    """Trajectories whose reward changes its side of the mean."""

    up: int
    """From below to above: discouraged now, encouraged then."""
    down: int


class Example(_View):
    """One trajectory that moves."""

    id: str
    update: int
    """In which it was trained on."""
    now: float
    then: float
    flips: bool
    components: dict[str, float]


class DryRun(_View):
    """What a proposal would change."""

    asked: Annotated[int, Field(ge=1)]
    trajectories: int
    """Found in the archive, newest first."""
    compared: int
    """Those of them that have every component of both preferences."""
    version: int
    """The preference that `now` is under."""
    edges: list[float]
    """Of the histograms' bins, shared by both; empty of nothing."""
    now: Distribution
    then: Distribution
    flips: Flips
    examples: list[Example]
    """The biggest movers, the biggest first."""
    missing: dict[str, int]
    """Components of the proposal that trajectories lack, and how many: those would be sent back for scoring."""
    missing_now: int
    """Trajectories that lack a component of the present preference."""
    not_finite: int
    """Trajectories whose reward would be no number, or beyond LARGEST, under one of the two."""
    unreadable: int = 0
    """Archived updates that could not be read."""


@dataclass(frozen=True, slots=True)
class Archived:
    """A trajectory with its raw components, as it was trained on."""

    id: str
    update: int
    components: Mapping[str, float]
    judged: Mapping[str, str] = field(default_factory=dict)
    """As in sao.outcome.Scored."""

    def known_to(self, document: PreferenceDocument) -> dict[str, float]:
        """The components that hold under this document."""
        return known_to(document, self.components, self.judged)


@dataclass(frozen=True, slots=True)
class _Pair:
    of: Archived
    now: float
    then: float


def dry_run(
    archived: Sequence[Archived], now: PreferenceDocument, then: PreferenceDocument, *, version: int, asked: int
) -> DryRun:
    """Compare two preferences over these trajectories."""
    lacking = [then.components - one.known_to(then).keys() for one in archived]
    lacking_now = sum(bool(now.components - one.known_to(now).keys()) for one in archived)
    missing = Counter(name for names in lacking for name in names)
    whole = [
        one
        for one, names in zip(archived, lacking, strict=True)
        if not names and now.components <= one.known_to(now).keys()
    ]
    pairs = [pair for one in whole if (pair := _pair(one, now, then)) is not None]
    edges = _edges([value for pair in pairs for value in (pair.now, pair.then)])
    before, after = _sides([pair.now for pair in pairs]), _sides([pair.then for pair in pairs])
    turns = list(zip(before, after, strict=True))
    order = sorted(range(len(pairs)), key=lambda place: -abs(pairs[place].then - pairs[place].now))
    return DryRun(
        asked=asked,
        trajectories=len(archived),
        compared=len(pairs),
        version=version,
        edges=edges,
        now=_distribution([pair.now for pair in pairs], edges),
        then=_distribution([pair.then for pair in pairs], edges),
        flips=Flips(up=turns.count((-1, 1)), down=turns.count((1, -1))),
        examples=[
            _example(pairs[place], flips=turns[place] in {(-1, 1), (1, -1)})
            for place in order[:EXAMPLES]
            if pairs[place].now != pairs[place].then
        ],
        missing=dict(sorted(missing.items())),
        missing_now=lacking_now,
        not_finite=len(whole) - len(pairs),
    )


def _pair(one: Archived, now: PreferenceDocument, then: PreferenceDocument) -> _Pair | None:
    try:
        pair = _Pair(one, now.value(one.components), then.value(one.components))
    except (ValueError, OverflowError):
        return None
    return pair if max(abs(pair.now), abs(pair.then)) <= LARGEST else None


def _example(pair: _Pair, *, flips: bool) -> Example:
    one = pair.of
    return Example(
        id=one.id, update=one.update, now=pair.now, then=pair.then, flips=flips, components=dict(one.components)
    )


def _sides(values: Sequence[float]) -> list[int]:
    """Of the mean: 1 above, -1 below, 0 on it."""
    if not values:
        return []
    mean, same = statistics.fmean(values), _SAME * (max(values) - min(values))
    return [0 if abs(value - mean) <= same else int(math.copysign(1, value - mean)) for value in values]


def _edges(values: Sequence[float]) -> list[float]:
    if not values:
        return []
    low, high = min(values), max(values)
    width = (high - low) / BINS or 1.0 / BINS
    return [low + width * place for place in range(BINS)] + [max(high, low + width * BINS)]


def _distribution(values: Sequence[float], edges: Sequence[float]) -> Distribution:
    if not values:
        return Distribution(mean=None, std=None, deciles=[], histogram=[])
    bins = Counter(min(bisect_right(edges, value) - 1, BINS - 1) for value in values)
    ordered = sorted(values)
    return Distribution(
        mean=statistics.fmean(values),
        std=statistics.pstdev(values),
        deciles=[ordered[round(tenth * (len(ordered) - 1) / 10)] for tenth in range(11)],
        histogram=[bins[place] for place in range(BINS)],
    )
