"""Tasks whose scoring a test steers, and the steps it takes to bring a trajectory to the reward service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from sao.config.schema import RewardSection
from sao.outcome import OUTCOME, RewardOutcome
from sao.preference import PreferenceDocument
from sao.streams.base import Delivery, StreamName, TrajectoryStreams
from sao.tasks.base import Episode, Prompt, Scorer
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from sao.v1 import trajectory_pb2 as pb
from tests.support.rollouts import recorded

SETTINGS = RewardSection(component_timeout_s=5.0, claim_idle_s=0.05, max_deliveries=3, batch=4, threads=2)


class SteeredTask:
    """Two components, computed by whatever function the test gives."""

    name: str = "steered"
    prompts_path: Path = Path()
    heldout_prompts_path: Path = Path()
    components: frozenset[str] = frozenset({"correct", "style"})
    default_preference: PreferenceDocument = PreferenceDocument(name="first", weights={"correct": 1.0})

    def __init__(self, score: Callable[[Trajectory], Mapping[str, float]]) -> None:
        self._score = score

    def episode(self, prompt: Prompt, tokenizer: Tokenizer) -> Episode:
        raise NotImplementedError

    def score(self, trajectory: Trajectory, tokenizer: Tokenizer) -> Mapping[str, float]:
        return self._score(trajectory)


class TwoScorersTask(SteeredTask):
    """The same components from a scorer each."""

    def __init__(self, correct: Scorer, style: Scorer) -> None:
        super().__init__(lambda _: {})
        self.scorers: Mapping[str, Scorer] = {"correct": correct, "style": style}


def always(correct: float = 1.0, style: float = 0.5) -> SteeredTask:
    """Every trajectory has these components."""
    return SteeredTask(lambda _: {"correct": correct, "style": style})


def trajectory(finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP) -> Trajectory:
    """A small one, scored by its task alone."""
    return recorded([1], [([3, 2], [])], {}, task="steered", finish_reason=finish_reason)


async def append(streams: TrajectoryStreams, count: int, *, first_ordinal: int = 0) -> list[str]:
    """Put that many trajectories on the stream; their ids."""
    ids = []
    for ordinal in range(first_ordinal, first_ordinal + count):
        made = trajectory()
        fields = {"task": "steered", "ordinal": str(ordinal)}
        payload = made.message.SerializeToString()
        await streams.append(made.id, payload, ordinal=ordinal, sample=0, fields=fields)
        ids.append(made.id)
    return ids


async def scored(
    streams: TrajectoryStreams, count: int, timeout_s: float = 20.0
) -> list[tuple[Delivery, RewardOutcome]]:
    """The next `count` entries of SCORED, read as the trainer does."""
    found: list[Delivery] = []
    async with asyncio.timeout(timeout_s):
        while len(found) < count:
            found += await streams.read(StreamName.SCORED, "trainer", count=count - len(found), block_ms=50)
    return [(delivery, OUTCOME.validate_json(delivery.fields["outcome"])) for delivery in found]


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Return as soon as `condition` holds; AssertionError naming `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            msg = f"waited {timeout_s} s for {what}"
            raise AssertionError(msg)
        await asyncio.sleep(0.005)


def outcomes_of(pairs: Iterable[tuple[Delivery, RewardOutcome]]) -> dict[str, RewardOutcome]:
    """Outcome by trajectory id."""
    return {delivery.trajectory_id: outcome for delivery, outcome in pairs}
