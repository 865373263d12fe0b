"""Guards: what the last updates look like when a run collapses, in which case its weights must not be published.

A guard is a statistic of the last `window` policy updates and a limit. It judges once the window is full and at least
half of its updates define the number. It trips when the statistic is beyond the limit, and clears when `CALM`
judgements in a row have found it within, or undefined. So what the guards say is a function of the last
`window + CALM - 1` updates: whoever shows them these again after a restart hears the same.

A window is the metrics of consecutive policy updates, oldest first (names: services/trainer/core/metrics.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sao.config.schema import GuardsSection

CALM = 3
"""Judgements within the limit that clear a guard: one noisy update does not release a collapsing policy."""

Window = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Trip:
    """A guard that is beyond its limit, as it was when last found so."""

    guard: str
    value: float
    limit: float
    unit: str
    advice: str
    """What usually causes it and which settings act on it."""

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.guard} {self.value:.3g}{unit}, limit {self.limit:g}"


def entropy_slope(window: Window) -> float | None:
    """Absolute slope of the least-squares line through the entropy, in nats per update."""
    points = _defined(window, lambda numbers: numbers.get("entropy"))
    if len(points) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return abs(sum((x - mean_x) * (y - mean_y) for x, y in points)) / spread


def rejected_share(window: Window) -> float | None:
    """Mean over updates of the share of non-stale action tokens that importance sampling rejected."""
    points = _defined(window, _rejected)
    return sum(y for _, y in points) / len(points) if points else None


def mismatch_kl(window: Window) -> float | None:
    """Mean over lag-0 action tokens of the k3 estimate of policy against rollout, in nats."""
    points = _defined(window, lambda numbers: numbers.get("kl_rollout.lag_0"))
    tokens = [window[x].get("dis_tokens.lag_0", 0.0) for x, _ in points]
    total = sum(tokens)
    return sum(n * y for n, (_, y) in zip(tokens, points, strict=True)) / total if total else None


def explained_variance(window: Window) -> float | None:
    """The best explained variance of the critic: after a change of what is rewarded single ones fall without bound."""
    return max((y for _, y in _defined(window, lambda numbers: numbers.get("explained_variance"))), default=None)


@dataclass(frozen=True)
class _Guard:
    name: str
    """As its setting is called."""
    statistic: Callable[[Window], float | None]
    unit: str
    advice: str
    limit_is_least: bool = False

    def judge(self, window: Window, limit: float) -> Trip | None:
        value = self.statistic(window)
        if value is None or (value >= limit if self.limit_is_least else value <= limit):
            return None
        return Trip(self.name, value, limit, self.unit, self.advice)


_GUARDS = (
    _Guard(
        "entropy_slope",
        entropy_slope,
        "nats per update",
        "the policy is freezing or dissolving: lower trainer.lr or raise trainer.kl_coef",
    ),
    _Guard(
        "rejected_share",
        rejected_share,
        "of the fresh action tokens",
        "the policy runs away from what is sampled: lower trainer.lr or trainer.max_lag, or raise trainer.kl_coef",
    ),
    _Guard(
        "mismatch_kl",
        mismatch_kl,
        "nats",
        "engine and trainer disagree about the same weights: compare engine.dtype with trainer.dtype, and what the "
        "weights service says of its canary",
    ),
    _Guard(
        "explained_variance",
        explained_variance,
        "",
        "the critic is worse than a constant: lower critic.lr or raise critic.pretrain_trajectories",
        limit_is_least=True,
    ),
)
GUARD_NAMES = tuple(guard.name for guard in _GUARDS)


class Guards:
    """All guards of a run over its policy updates, as they are made."""

    def __init__(self, settings: GuardsSection) -> None:
        limits = {guard: getattr(settings, guard.name) for guard in _GUARDS}
        self._limits: dict[_Guard, float] = {guard: limit for guard, limit in limits.items() if limit != "off"}
        self._window: deque[Mapping[str, float]] = deque(maxlen=settings.window)
        self._judgements: dict[_Guard, deque[Trip | None]] = {guard: deque(maxlen=CALM) for guard in self._limits}
        self.memory = settings.window + CALM - 1
        """Updates that decide what the guards say."""

    def observe(self, numbers: Mapping[str, float]) -> None:
        """Take in the metrics of the next policy update."""
        self._window.append(numbers)
        if len(self._window) == self._window.maxlen:
            for guard, limit in self._limits.items():
                self._judgements[guard].append(guard.judge(self._window, limit))

    @property
    def tripped(self) -> list[Trip]:
        """The guards that have not cleared; publishing is held while there are any."""
        newest_first = (reversed(judgements) for judgements in self._judgements.values())
        last = (next((trip for trip in judgements if trip is not None), None) for judgements in newest_first)
        return [trip for trip in last if trip is not None]


def _defined(window: Window, number: Callable[[Mapping[str, float]], float | None]) -> list[tuple[int, float]]:
    """(Place in the window, number) where it is defined; nothing when fewer than half of the updates define it."""
    found = [(x, y) for x, numbers in enumerate(window) if (y := number(numbers)) is not None]
    return found if 2 * len(found) >= len(window) else []


def _rejected(numbers: Mapping[str, float]) -> float | None:
    stale = numbers.get("dis_stale_fraction", 1.0)
    if stale >= 1.0:
        return None
    return sum(numbers[f"dis_{verdict}_fraction"] for verdict in ("rejected_low", "rejected_high", "non_finite")) / (
        1.0 - stale
    )
