"""What the console's routes answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from sao.board.base import EngineFacts, TrainerState, VersionRecord
from sao.curves import Adaptation
from sao.dead_letters import age_s
from sao.streams.base import DeadLetter, StreamName
from services.reward.alarms import Alarm

MAX_REASON = 2000
"""Characters of a dead letter's reason that are shown."""


class _View(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RunView(_View):
    """How a run stands; what is not known yet is none."""

    name: str
    task: str
    algorithm: str
    seed: int
    state: TrainerState | None
    """Of the trainer; none: it has not begun."""
    stall: str
    """Why the run seems to stand still, in words; else empty."""
    phase: str
    """How far the critic's pre-training or warm-up is, in words; empty once the policy trains."""
    held: list[str]
    """Guards that hold publishing."""
    alarms: list[Alarm]
    """Signs of reward hacking in what this replica scored; those of the others: the metric sao_reward_hacking_alarm."""
    now_s: float
    """Unix seconds on this server."""
    last_update_s: float | None
    update: int
    updates: int | None
    """Policy updates after which the run ends."""
    trajectories: int
    """Trained on."""
    reward: float | None
    """Mean of the last (up to) 100."""
    components: dict[str, float]
    """The same mean of each raw component."""
    lag: float | None
    """Mean of the last update's trajectories, in updates."""
    version: str | None
    """Newest published weight version."""
    trajectories_per_s: float | None
    tokens_per_s: float | None
    rejected: float | None
    """Share of the last update's action tokens that carried no policy gradient."""
    explained_variance: float | None
    entropy: float | None
    waiting_for_scoring: int
    waiting_for_training: int
    """Scored, and not yet behind a checkpoint of the trainer."""
    caught_up: bool
    """False: the run's folder is still being read, the numbers are of an earlier moment."""


class AdaptationsView(_View):
    adaptations: list[Adaptation]
    """Newest preference first."""


class EnginesView(_View):
    engines: list[EngineFacts]


class VersionView(_View):
    name: str
    update: Annotated[int, Field(ge=0)]
    parent: str | None
    epoch: int
    engines: list[str]
    """Those that serve it, or are being brought to it."""


class VersionsView(_View):
    """The newest announced weight versions, newest first."""

    versions: list[VersionView]
    total: int


class DeadLetterView(_View):
    entry_id: str
    trajectory_id: str
    stream: str
    """Where it was when it was buried."""
    kind: str
    reason: str
    """The first 2000 characters."""
    attempt: int
    buried_ms: int
    age_s: float
    bytes: int


class DeadLettersView(_View):
    """Newest first."""

    dead_letters: list[DeadLetterView]
    next: str | None
    """`before` of the page of older ones; none: this is the last."""


def version_views(records: dict[str, VersionRecord], engines: dict[str, EngineFacts], limit: int) -> VersionsView:
    """The newest `limit`, by trainer epoch and update."""
    newest = sorted(records.values(), key=lambda one: (one.epoch, one.update, one.name), reverse=True)[:limit]
    serving: dict[str, list[str]] = {}
    for facts in engines.values():
        serving.setdefault(facts.version, []).append(facts.engine_id)
    return VersionsView(
        versions=[VersionView(**one.model_dump(), engines=sorted(serving.get(one.name, []))) for one in newest],
        total=len(records),
    )


def letter_view(letter: DeadLetter) -> DeadLetterView:
    """The letter without its payload."""
    return DeadLetterView(
        entry_id=letter.entry_id,
        trajectory_id=letter.trajectory_id,
        stream=letter.stream.value,
        kind=letter.kind,
        reason=letter.reason[:MAX_REASON],
        attempt=letter.attempt,
        buried_ms=letter.buried_ms,
        age_s=age_s(letter),
        bytes=letter.size,
    )


def duration(seconds: float) -> str:
    """In the largest unit that gives at least two."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def stall(*, state: TrainerState | None, quiet_s: float | None, scoring: int, training: int, after_s: float) -> str:
    """Why nothing seems to happen, or nothing; `quiet_s`: time since the last update."""
    if state is not TrainerState.TRAINING or quiet_s is None or quiet_s < after_s:
        return ""
    where = (
        "the reward service does not keep up: see logs/reward.log"
        if scoring > training
        else "the trainer has work and makes no update: see logs/trainer.log"
        if training
        else "nothing comes in: see the engines here, and logs/worker.log"
    )
    queues = f"{scoring} in {StreamName.TRAJECTORIES.value}, {training} in {StreamName.SCORED.value}"
    return f"no update for {duration(quiet_s)} ({queues}); {where}"
