"""One trajectory in, one typed outcome out. A failure is never a number.

The order makes a promise: the start is noted, *then* the current preference is read, then components are
computed. So whatever starts after a preference was stored is scored under it or a later one.

The task's components are always computed; of the run file's scorers only those that this preference reads, all at once.
What comes later (feedback) is waited for by nobody here: a preference that reads it leaves the scoring unfinished.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from google.protobuf.message import DecodeError

from sao.adaptation import FirstUse
from sao.config.schema import RewardSection
from sao.outcome import InfraFailed, Invalid, RewardOutcome, Scored, TimedOut, known_to
from sao.preference import MissingComponentError, Preference, PreferenceDocument
from sao.tasks.base import Scorer, SeparatelyScored, Task, UnscorableError
from sao.telemetry.logs import get_logger
from sao.telemetry.traces import child
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from sao.v1 import trajectory_pb2 as pb
from services.reward import metrics
from services.reward.alarm_watch import AlarmWatch
from services.reward.alarms import LENGTH
from services.reward.pool import DeadlinePassedError, ThreadPool
from services.reward.scorers.base import ComponentScorer, ScorerFailedError, ScoringRequest, mapping_of, number_of

log = get_logger(__name__)

Failure = TimedOut | InfraFailed | Invalid
_BROKEN_OFF = {pb.FINISH_REASON_ABORTED: "aborted", pb.FINISH_REASON_ENV_ERROR: "env_error"}


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What a document makes of a trajectory."""

    components: dict[str, float]
    judged: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Everything is computed but a component that comes later, and the document reads it."""

    components: dict[str, float]
    judged: dict[str, str]
    waits_for: str


class TrajectoryScorer:
    """Scores the trajectories of one task; `current_preference` asks the board, `scorers` are the run file's."""

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        current_preference: Callable[[], Awaitable[Preference | None]],
        settings: RewardSection,
        *,
        scorers: Sequence[ComponentScorer] = (),
        alarms: AlarmWatch | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._current_preference = current_preference
        self._timeout_s = settings.component_timeout_s
        self._late = settings.feedback.component if settings.feedback is not None else None
        self._alarms = alarms
        self._wall_clock = wall_clock
        self._first_use = FirstUse(wall_clock)
        own: Mapping[str, Scorer] = {"score": task.score}
        if isinstance(task, SeparatelyScored):
            own = task.scorers
        self._own = {
            name: (scorer, ThreadPool[Mapping[str, float]](name, settings.threads)) for name, scorer in own.items()
        }
        self._scorers = scorers
        self.most_waiting = max((scorer.concurrency for scorer in scorers), default=0)
        """So many trajectories may wait for the run file's scorers, beside those that are being worked on."""
        self.asks_scorers = False
        """Whether the preference that was last seen reads any of them."""

    async def look(self) -> None:
        """See the current preference without scoring anything."""
        if self._scorers and (preference := await self._current_preference()) is not None:
            self.asks_scorers = bool(self._read_by(preference.document))

    async def score(
        self,
        payload: bytes,
        given: Mapping[str, float] = MappingProxyType({}),
        *,
        on_waiting: Callable[[], None] = _nothing,
    ) -> RewardOutcome | Unfinished:
        """The outcome for these trajectory bytes; raises only what reading the preference raises.

        `given`: components that are known already. `on_waiting` is called when all that is left to do is to wait for
        the run file's scorers.
        """
        started_s = self._wall_clock()
        preference = await self._current_preference()
        if preference is None:
            return InfraFailed(component="preference", reason="the board holds no preference")
        metrics.PREFERENCE_VERSION.set(preference.version)
        self.asks_scorers = bool(self._read_by(preference.document))
        try:
            trajectory = Trajectory.from_bytes(payload)
        except DecodeError as error:
            return Invalid(reason=f"payload is no sao.v1.Trajectory: {error}")
        found = await self.evaluate(trajectory, preference.document, given, on_waiting=on_waiting)
        if not isinstance(found, Evaluated):
            return found
        if (seconds := self._first_use.seconds(preference)) is not None:
            metrics.ADAPTATION.set(seconds)
        if self._alarms is not None:
            self._alarms.observe({**found.components, LENGTH: float(trajectory.action_count)}, preference)
        return outcome_of(found, preference, started_s)

    async def evaluate(
        self,
        trajectory: Trajectory,
        document: PreferenceDocument,
        given: Mapping[str, float] = MappingProxyType({}),
        *,
        on_waiting: Callable[[], None] = _nothing,
    ) -> Evaluated | Unfinished | Failure:
        """What this document makes of a trajectory; changes nothing but the scorers' own metrics."""
        if reason := _BROKEN_OFF.get(trajectory.message.finish_reason):
            return Invalid(reason=f"finish reason {reason}: the rollout broke off, its reward would say nothing")
        request = ScoringRequest(trajectory, self._tokenizer, document)
        asked = self._read_by(document)
        others = asyncio.gather(*(self._ask(scorer, request) for scorer in asked))
        try:
            own = _united(await asyncio.gather(*(self._run(name, trajectory) for name in self._own)))
            own = self._checked(own) if isinstance(own, Mapping) else own
            if not isinstance(own, Mapping):
                return own
            if not others.done():
                on_waiting()
            rest = _united(await others)
        finally:
            others.cancel()  # what the task's own scorers refused needs no judge
        if not isinstance(rest, Mapping):
            return rest
        components = {**own, **rest, **given}
        judged = {name: document.rubric_id for scorer in asked if scorer.judges for name in scorer.components}
        if self._late is not None and self._late in document.components - components.keys():
            return Unfinished(components, judged, self._late)
        try:
            return weighed(components, judged, document)
        except MissingComponentError as error:
            return InfraFailed(component="preference", reason=f"{document.name}: {error}")

    def _read_by(self, document: PreferenceDocument) -> list[ComponentScorer]:
        return [scorer for scorer in self._scorers if document.components & scorer.components.keys()]

    async def _run(self, name: str, trajectory: Trajectory) -> Mapping[str, float] | Failure:
        scorer, pool = self._own[name]
        call = pool.run(partial(scorer, trajectory, self._tokenizer), self._timeout_s)
        return await _typed(name, self._timeout_s, trajectory.id, call)

    async def _ask(self, scorer: ComponentScorer, request: ScoringRequest) -> Mapping[str, float] | Failure:
        return await _typed(scorer.name, scorer.deadline_s, request.trajectory.id, scorer.score(request))

    def _checked(self, raw: Mapping[str, float]) -> dict[str, float] | Failure:
        if raw.keys() != self._task.components:
            found, expected = sorted(map(str, raw)), sorted(self._task.components)
            return InfraFailed(component="score", reason=f"task {self._task.name} gave {found}, declares {expected}")
        components = {}
        for name, value in raw.items():
            try:
                components[name] = number_of(name, value)
            except ScorerFailedError as error:
                return InfraFailed(component=name, reason=str(error))
        return components


def weighed(
    components: dict[str, float], judged: dict[str, str], document: PreferenceDocument
) -> Evaluated | InfraFailed:
    """What this document makes of raw components; MissingComponentError when it reads one that it cannot use."""
    try:
        return Evaluated(components, judged, document.value(known_to(document, components, judged)))
    except (ValueError, OverflowError) as error:
        return InfraFailed(component="preference", reason=f"{document.name}: {error}")


def outcome_of(found: Evaluated, preference: Preference, started_s: float) -> Scored:
    """The outcome to hand over; shown in the metrics. The preference was read after the moment `started_s`."""
    for name, component in found.components.items():
        metrics.COMPONENT_VALUE.labels(name).observe(component)
    metrics.VALUE.observe(found.value)
    return Scored(
        components=found.components,
        value=found.value,
        scored_under=preference.version,
        scoring_started_s=started_s,
        judged=found.judged,
    )


async def _typed(
    name: str, deadline_s: float, trajectory_id: str, call: Awaitable[Mapping[str, float]]
) -> Mapping[str, float] | Failure:
    """What the call gives, or how it failed; counted and timed either way."""
    with metrics.COMPONENT_SECONDS.labels(name).time(), child("component") as span:
        found = await _outcome_of(name, deadline_s, trajectory_id, call)
        kind = "scored" if isinstance(found, Mapping) else found.kind
        span.set(component=name, outcome=kind)
        if not isinstance(found, Mapping):
            span.fail(kind)
    metrics.COMPONENT_OUTCOMES.labels(name, kind).inc()
    return found


async def _outcome_of(
    name: str, deadline_s: float, trajectory_id: str, call: Awaitable[Mapping[str, float]]
) -> Mapping[str, float] | Failure:
    try:
        return mapping_of(await call)
    except DeadlinePassedError:
        return TimedOut(component=name, after_s=deadline_s)
    except UnscorableError as error:
        return Invalid(reason=f"{name}: {error}"[:500])
    except ScorerFailedError as error:
        return InfraFailed(component=name, reason=str(error)[:500])
    except Exception as error:  # a user's scorer may raise anything; it becomes a typed outcome
        log.warning("scorer failed", component=name, trajectory=trajectory_id, exc_info=error)
        return InfraFailed(component=name, reason=f"{type(error).__name__}: {error}"[:500])


def _united(results: Sequence[Mapping[str, float] | Failure]) -> dict[str, float] | Failure:
    """All components together, or the failure to report."""
    failures = [result for result in results if not isinstance(result, Mapping)]
    if failures:
        # Invalid first: no retry can help it.
        return min(failures, key=lambda failure: not isinstance(failure, Invalid))
    return {name: value for result in results if isinstance(result, Mapping) for name, value in result.items()}
