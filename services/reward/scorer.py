"""One trajectory in, one typed outcome out. A failure is never a number.

The order makes a promise: the start is noted, *then* the current preference is read, then components are
computed. So whatever starts after a preference was stored is scored under it or a later one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from google.protobuf.message import DecodeError

from sao.adaptation import FirstUse
from sao.config.schema import RewardSection
from sao.outcome import InfraFailed, Invalid, RewardOutcome, Scored, TimedOut
from sao.preference import Preference
from sao.tasks.base import Scorer, SeparatelyScored, Task, UnscorableError
from sao.telemetry.logs import get_logger
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from sao.v1 import trajectory_pb2 as pb
from services.reward import metrics
from services.reward.pool import DeadlinePassedError, ThreadPool

log = get_logger(__name__)

Failure = TimedOut | InfraFailed | Invalid
_BROKEN_OFF = {pb.FINISH_REASON_ABORTED: "aborted", pb.FINISH_REASON_ENV_ERROR: "env_error"}


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Everything is computed but a component that comes later, and the current preference reads it."""

    components: Mapping[str, float]


class TrajectoryScorer:
    """Scores the trajectories of one task; `current_preference` asks the board, `late` names what comes later."""

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        current_preference: Callable[[], Awaitable[Preference | None]],
        settings: RewardSection,
        *,
        late: str | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._task = task
        self._late = late
        self._first_use = FirstUse(wall_clock)
        self._tokenizer = tokenizer
        self._current_preference = current_preference
        self._timeout_s = settings.component_timeout_s
        self._wall_clock = wall_clock
        scorers: Mapping[str, Scorer] = {"score": task.score}
        if isinstance(task, SeparatelyScored):
            scorers = task.scorers
        self._scorers = {
            name: (scorer, ThreadPool[Mapping[str, float]](name, settings.threads)) for name, scorer in scorers.items()
        }

    async def score(
        self, payload: bytes, given: Mapping[str, float] = MappingProxyType({})
    ) -> RewardOutcome | Unfinished:
        """The outcome for these trajectory bytes; raises only what reading the preference raises.

        `given`: components that are known already, beside the task's own.
        """
        started_s = self._wall_clock()
        preference = await self._current_preference()
        if preference is None:
            return InfraFailed(component="preference", reason="the board holds no preference")
        metrics.PREFERENCE_VERSION.set(preference.version)
        try:
            trajectory = Trajectory.from_bytes(payload)
        except DecodeError as error:
            return Invalid(reason=f"payload is no sao.v1.Trajectory: {error}")
        if reason := _BROKEN_OFF.get(trajectory.message.finish_reason):
            return Invalid(reason=f"finish reason {reason}: the rollout broke off, its reward would say nothing")
        results = await asyncio.gather(*(self._run(name, trajectory) for name in self._scorers))
        failures = [result for result in results if not isinstance(result, Mapping)]
        if failures:
            # Invalid first: no retry can help it.
            return min(failures, key=lambda failure: not isinstance(failure, Invalid))
        components = {k: v for result in results if isinstance(result, Mapping) for k, v in result.items()}
        return self._outcome(components, given, preference, started_s)

    async def _run(self, name: str, trajectory: Trajectory) -> Mapping[str, float] | Failure:
        scorer, pool = self._scorers[name]
        try:
            with metrics.COMPONENT_SECONDS.labels(name).time():
                return await pool.run(partial(scorer, trajectory, self._tokenizer), self._timeout_s)
        except DeadlinePassedError:
            return TimedOut(component=name, after_s=self._timeout_s)
        except UnscorableError as error:
            return Invalid(reason=f"{name}: {error}")
        except Exception as error:  # a user's scorer may raise anything; it becomes a typed outcome
            log.warning("scorer failed", component=name, trajectory=trajectory.id, exc_info=error)
            return InfraFailed(component=name, reason=f"{type(error).__name__}: {error}"[:500])

    def _outcome(
        self, raw: Mapping[str, float], given: Mapping[str, float], preference: Preference, started_s: float
    ) -> RewardOutcome | Unfinished:
        if raw.keys() != self._task.components:
            found, expected = sorted(raw), sorted(self._task.components)
            return InfraFailed(component="score", reason=f"task {self._task.name} gave {found}, declares {expected}")
        try:
            components = {name: float(value) for name, value in raw.items()} | dict(given)
        except (TypeError, ValueError) as error:
            return InfraFailed(component="score", reason=f"not every component is a number: {error}")
        for name, value in components.items():
            if not math.isfinite(value):
                return InfraFailed(component=name, reason=f"{name} is {value}, expected a finite number")
        if self._late in preference.document.components - components.keys():
            return Unfinished(components)
        outcome = evaluate(components, preference, started_s)
        if isinstance(outcome, Scored) and (seconds := self._first_use.seconds(preference)) is not None:
            metrics.ADAPTATION.set(seconds)
        return outcome


def evaluate(components: Mapping[str, float], preference: Preference, started_s: float) -> Scored | InfraFailed:
    """The reward of these components; read the preference after the moment `started_s`."""
    try:
        value = preference.document.value(components)
    except (KeyError, ValueError, OverflowError) as error:
        return InfraFailed(component="preference", reason=f"version {preference.version}: {error}")
    for name, component in components.items():
        metrics.COMPONENT_VALUE.labels(name).observe(component)
    metrics.VALUE.observe(value)
    return Scored(
        components=dict(components), value=value, scored_under=preference.version, scoring_started_s=started_s
    )
