"""What comes one at a time is handed to the update in the pieces that the algorithm can use.

    OneByOne      each trajectory as it arrives (a critic, or a moving average, tells its advantage)
    WholeUpdates  when an update's worth is there (advantages are normalised over it)
    Groups        when all rollouts of a prompt are there (advantages compare them)

The barrier of the group algorithms lives here and nowhere else: streams, leases and services carry single rollouts.
A group that stays incomplete past its deadline repeats valid members when more than half are there, else is dropped;
one of which members go back for a new score waits for them.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol

from sao.config.schema import GroupSection, RunConfig
from sao.telemetry.logs import get_logger
from services.trainer import metrics
from services.trainer.consumer import RESCORE, Arrived, Consumer, Position, Refused, Taken
from services.trainer.core.baselines import Baseline, State, baseline_of, group_advantages, normalised
from services.trainer.core.update import TrajectoryStats

log = get_logger(__name__)

MOST_OPEN_GROUPS = 1024
"""Beyond it the oldest incomplete group is closed early; so many filled ones are remembered."""


class Batcher(Protocol):
    """Between the consumer and the update."""

    async def next(self, position: Position, *, block_ms: int) -> list[Taken] | Refused | None:
        """What trains next, all of it in one update; empty when something came that has to wait for others.

        Else why something was refused, or None when nothing came within `block_ms`.
        """

    def finished(self, taken: Sequence[Taken], stats: Sequence[TrajectoryStats]) -> None:
        """The update of these is made: a baseline learns their rewards."""

    def numbers(self) -> dict[str, float]:
        """Metrics of the batching since the last call."""

    def state(self) -> State:
        """What a checkpoint must hold to go on."""

    def load(self, state: Mapping[str, Sequence[float]]) -> None: ...


class _WithBaseline:
    """What the batchers share that compare a reward with a baseline, or with nothing."""

    def __init__(self, consumer: Consumer, baseline: Baseline | None) -> None:
        self._consumer = consumer
        self._baseline = baseline

    def finished(self, taken: Sequence[Taken], stats: Sequence[TrajectoryStats]) -> None:
        if self._baseline is not None:
            learn(self._baseline, taken, stats)

    def numbers(self) -> dict[str, float]:
        return {}

    def state(self) -> State:
        return self._baseline.state() if self._baseline is not None else {}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        if self._baseline is not None:
            self._baseline.load(state)


class OneByOne(_WithBaseline):
    """Each trajectory by itself."""

    async def next(self, position: Position, *, block_ms: int) -> list[Taken] | Refused | None:
        found = await self._consumer.take(position, block_ms=block_ms)
        if not isinstance(found, Taken):
            return found
        return [found] if self._baseline is None else above([found], self._baseline)


class WholeUpdates(_WithBaseline):
    """Everything of an update at its end, for what is normalised over it."""

    def __init__(self, consumer: Consumer, baseline: Baseline, size: int) -> None:
        super().__init__(consumer, baseline)
        self._tracker = baseline
        self._size = size
        self._waiting: list[Taken] = []

    async def next(self, position: Position, *, block_ms: int) -> list[Taken] | Refused | None:
        found = await self._consumer.take(position, block_ms=block_ms)
        if not isinstance(found, Taken):
            return found
        self._waiting.append(found)
        if len(self._waiting) < self._size:
            return []
        whole, self._waiting = self._waiting, []
        return above_normalised(whole, self._tracker)


@dataclass
class _Group:
    since: float
    members: list[Arrived] = field(default_factory=list)
    judged: list[Taken | Refused] = field(default_factory=list)
    """Of the first members, once it is closed."""


class Groups:
    """The rollouts of one prompt together."""

    def __init__(
        self, consumer: Consumer, settings: GroupSection, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._consumer = consumer
        self._settings = settings
        self._clock = clock
        self._open: dict[int, _Group] = {}
        self._closing: _Group | None = None
        """Kept until all of it is decided: an outage in between loses nothing, the next call goes on from there."""
        self._filled: deque[int] = deque(maxlen=MOST_OPEN_GROUPS)
        """Their stragglers are less than half of a group: they cannot train, and must not wait for each other."""
        self._numbers: Counter[str] = Counter()

    async def next(self, position: Position, *, block_ms: int) -> list[Taken] | Refused | None:
        self._closing = self._closing or self._overdue()
        if self._closing is None:
            arrived = await self._consumer.arrive(block_ms=block_ms)
            if not isinstance(arrived, Arrived):
                return arrived
            ordinal = arrived.trajectory.message.ordinal
            if ordinal in self._filled:
                return await self._consumer.drop(arrived, "group_late")
            await self._consumer.hold(arrived)
            group = self._open.setdefault(ordinal, _Group(self._clock()))
            group.members.append(arrived)
            if len(group.members) < self._settings.size:
                return []
            self._closing = self._open.pop(ordinal)
        closed = await self._close(self._closing, position)
        self._closing = None
        return closed

    def finished(self, taken: Sequence[Taken], stats: Sequence[TrajectoryStats]) -> None:
        """A group compares its members with each other: there is nothing to learn."""

    def numbers(self) -> dict[str, float]:
        counted, self._numbers = self._numbers, Counter()
        return {f"groups_{outcome}": float(counted[outcome]) for outcome in metrics.GROUP_OUTCOMES}

    def state(self) -> State:
        """Nothing: incomplete groups are not settled, and so are delivered again."""
        return {}

    def load(self, state: Mapping[str, Sequence[float]]) -> None: ...

    def _overdue(self) -> _Group | None:
        """The oldest group, open no longer, when its time or the room is over."""
        if not self._open:
            return None
        ordinal, group = next(iter(self._open.items()))
        late = self._clock() - group.since > self._settings.timeout_s
        return self._open.pop(ordinal) if late or len(self._open) > MOST_OPEN_GROUPS else None

    async def _close(self, group: _Group, position: Position) -> list[Taken] | Refused:
        """Decide about the members now: their lag and their preference are those of the update they train in."""
        ordinal = group.members[0].trajectory.message.ordinal
        for member in group.members[len(group.judged) :]:
            group.judged.append(await self._consumer.judge(member, position))
        valid = [one for one in group.judged if isinstance(one, Taken)]
        if any(isinstance(one, Refused) and one.reason == RESCORE for one in group.judged):
            kept = {taken.trajectory.id for taken in valid}
            if kept:
                waiting = [member for member in group.members if member.trajectory.id in kept]
                self._open[ordinal] = _Group(self._clock(), waiting)
            log.info("group waits for new scores", ordinal=ordinal, here=len(kept), expected=self._settings.size)
            return []
        missing = self._settings.size - len(valid)
        if 2 * len(valid) <= self._settings.size:
            for i, one in enumerate(group.judged):
                if isinstance(one, Taken):
                    group.judged[i] = await self._consumer.drop(one, "group_incomplete")
            log.warning("group dropped", ordinal=ordinal, valid=len(valid), expected=self._settings.size)
            self._count("dropped")
            return Refused(group.members[0].trajectory.id, "group_incomplete")
        if missing:
            self._filled.append(ordinal)
            log.warning("group filled with repeats", ordinal=ordinal, valid=len(valid), repeated=missing)
        self._count("filled" if missing else "complete")
        if len({taken.reward for taken in valid}) == 1:
            self._count("zero_spread")
        return compared(valid, self._settings.size)

    def _count(self, outcome: str) -> None:
        self._numbers[outcome] += 1
        metrics.GROUPS.labels(outcome).inc()


def batcher_of(config: RunConfig, consumer: Consumer) -> Batcher:
    """The batcher that the run's algorithm needs."""
    if config.algorithm.in_groups:
        return Groups(consumer, config.group)
    baseline = baseline_of(config)
    if baseline is not None and config.algorithm.advantage == "tracker":
        return WholeUpdates(consumer, baseline, config.trainer.trajectories_per_update)
    return OneByOne(consumer, baseline)


def again(taken: Sequence[Taken], config: RunConfig, baseline: Baseline | None) -> list[Taken]:
    """The trajectories of one past update, in the order they trained in, as the run's batcher handed them over."""
    if config.algorithm.in_groups:
        groups = groupby(taken, key=lambda one: one.trajectory.message.ordinal)
        return [one for _, members in groups for one in compared(list(members), config.group.size)]
    if baseline is None:
        return list(taken)
    return (above_normalised if config.algorithm.advantage == "tracker" else above)(taken, baseline)


def compared(members: Sequence[Taken], size: int) -> list[Taken]:
    """A group of `size`, its first members repeated where some are missing, each compared with the others."""
    missing = size - len(members)
    rewards = [taken.reward for taken in members]
    advantages = group_advantages([*rewards, *rewards[:missing]])
    copies = [1 + (i < missing) for i in range(len(members))]
    return [
        with_advantage(taken, advantage, count)
        for taken, advantage, count in zip(members, advantages, copies, strict=False)
    ]


def above(taken: Sequence[Taken], baseline: Baseline) -> list[Taken]:
    """Each with how far its reward lies above the baseline."""
    return [with_advantage(one, one.reward - baseline.value(one.trajectory.message.prompt_id)) for one in taken]


def above_normalised(taken: Sequence[Taken], baseline: Baseline) -> list[Taken]:
    """The same, normalised over an update's trajectories."""
    advantages = normalised([one.reward - baseline.value(one.trajectory.message.prompt_id) for one in taken])
    return [with_advantage(one, advantage) for one, advantage in zip(taken, advantages, strict=True)]


def learn(baseline: Baseline, taken: Sequence[Taken], stats: Sequence[TrajectoryStats]) -> None:
    """Let the baseline take in the rewards of a finished update."""
    for one, its in zip(taken, stats, strict=True):
        baseline.learn(one.trajectory.message.prompt_id, one.reward, drift(its))


def with_advantage(taken: Taken, advantage: float, copies: int = 1) -> Taken:
    """The same trajectory with the advantage of its action tokens, and how often it counts."""
    return replace(taken, tensors=replace(taken.tensors, advantage=advantage, copies=copies))


def drift(stats: TrajectoryStats) -> float:
    """Mean k3 estimate (nats per token) of how far the policy is from the one that sampled this trajectory."""
    ratios_A = stats.ratios_A.double()
    finite_A = ratios_A[ratios_A.isfinite() & (ratios_A > 0)]
    return float((finite_A - 1 - finite_A.log()).mean()) if len(finite_A) else math.inf
