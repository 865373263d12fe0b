"""After any history of crashes and fall-backs, exactly what the weights lack and the stream lacks is trained again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sao.archive import Archive
from sao.outcome import Scored
from sao.rows import CRITIC_ONLY
from sao.streams.memory import MemoryStreams
from sao.v1 import archive_pb2, trajectory_pb2
from services.trainer.checkpoint import Progress
from services.trainer.loop import fresh_progress
from services.trainer.recovery import effective_steps, lost_work, recent_values, undone

WARM_UP = 2
SCORED = Scored(components={"right": 1.0}, value=1.0, scored_under=1, scoring_started_s=1.0)


@dataclass
class Streams(MemoryStreams):
    """Payloads only: what was taken and is not settled."""

    waiting: list[str] = field(default_factory=list)

    async def payload(self, trajectory_id: str) -> bytes | None:
        return b"there" if trajectory_id in self.waiting else None


@dataclass
class Run:
    """A trainer reduced to its books, over a real archive."""

    archive: Archive
    streams: Streams = field(default_factory=Streams)
    numbers: Iterator[int] = field(default_factory=count)
    epoch: int = 1
    begun: Progress = field(default_factory=lambda: fresh_progress("unit"))
    update: int = 0
    critic_only: int = 0
    held: list[str] = field(default_factory=list)
    """What the weights of this life were trained on, oldest first."""
    queue: list[str] = field(default_factory=list)
    chain: list[tuple[int, int, int]] = field(default_factory=list)
    """(epoch, update, warm-up steps) of every step that made the weights of this life."""
    checkpoints: list[tuple[Progress, list[str], list[tuple[int, int, int]]]] = field(default_factory=list)
    ever: set[str] = field(default_factory=set)

    def name(self, number: int) -> str:
        return f"trajectory-{number}"

    def number(self, name: str) -> int:
        return int(name.split("-")[1])

    def step(self, size: int) -> None:
        while len(self.queue) < size:
            self.streams.waiting.append(self.name(next(self.numbers)))
            self.queue.append(self.streams.waiting[-1])
        ids, self.queue = self.queue[:size], self.queue[size:]
        warming = self.update == 0 and self.critic_only < WARM_UP
        self.critic_only += warming
        self.update += not warming
        self.archive.append(
            archive_pb2.ArchivedUpdate(
                update=self.update,
                trainer_epoch=self.epoch,
                trajectories=[
                    archive_pb2.TrainedTrajectory(
                        trajectory=trajectory_pb2.Trajectory(id=trajectory_id, task_payload_json="what was written"),
                        outcome_json=SCORED.model_dump_json(),
                        reward=float(self.number(trajectory_id)),
                    )
                    for trajectory_id in ids
                ],
                metrics={CRITIC_ONLY: float(self.critic_only)},
            )
        )
        self.held += ids
        self.ever |= set(ids)
        self.chain.append((self.epoch, self.update, self.critic_only if warming else 0))
        newest = self.checkpoints[-1][0] if self.checkpoints else None
        effective = effective_steps(self.archive, newest)
        assert [(step.name.epoch, *step.position) for step in effective] == self.chain

    def checkpoint(self) -> None:
        here = {"update": self.update, "critic_only": self.critic_only, "trainer_epoch": self.epoch}
        stretches = self.begun.stretches_to(self.epoch, self.update, self.critic_only)
        progress = self.begun.model_copy(update={**here, "stretches": stretches})
        self.checkpoints.append((progress, list(self.held), list(self.chain)))
        self.streams.waiting = [i for i in self.streams.waiting if i not in self.held]

    async def restart(self, fall_back: int) -> None:
        del self.checkpoints[len(self.checkpoints) - min(fall_back, len(self.checkpoints)) :]
        self.epoch += 1
        self.begun, self.held, self.chain = fresh_progress("unit"), [], []
        if self.checkpoints:
            self.begun, held, chain = self.checkpoints[-1]
            self.held, self.chain = list(held), list(chain)
        self.update, self.critic_only = self.begun.update, self.begun.critic_only

        assert undone(self.archive, self.begun, 1).keys() >= self.ever - set(self.held)
        again = [lost.trajectory.id for lost in await lost_work(self.archive, self.begun, self.streams)]

        assert len(again) == len(set(again))
        assert set(again) == self.ever - set(self.held) - set(self.streams.waiting)
        window = [self.name(int(reward)) for _, reward in recent_values(self.archive, self.begun, 3)]
        assert window == self.held[-3:]
        self.queue = again + [i for i in self.streams.waiting if i not in self.held]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("checkpoint"), st.just(0)),
        st.tuples(st.just("restart"), st.integers(0, 2)),
    ),
    max_size=24,
)


@settings(max_examples=60, deadline=None)
@given(actions)
async def test_nothing_is_lost_and_nothing_comes_twice_whatever_was_abandoned(
    history: Sequence[tuple[str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Archive(Path(folder)))
        for action, number in history:
            match action:
                case "step":
                    run.step(number)
                case "checkpoint":
                    run.checkpoint()
                case _:
                    await run.restart(number)
        await run.restart(1)
        await run.restart(0)


async def test_a_checkpoint_that_says_nothing_of_its_epochs_offers_nothing_twice(tmp_path: Path) -> None:
    run = Run(Archive(tmp_path))
    for _ in range(4):
        run.step(1)
    run.checkpoint()
    await run.restart(0)
    run.step(1)
    run.checkpoint()
    old = run.checkpoints[-1][0].model_copy(update={"stretches": []})
    assert await lost_work(run.archive, old, run.streams) == []
    assert old.stretches_to(9, 9, WARM_UP) == []


async def test_the_window_of_several_ranks_is_filled_with_what_rank_0_has_seen(tmp_path: Path) -> None:
    """Else a restart judges the critic's gate by other trajectories than the life before it did."""
    run = Run(Archive(tmp_path))
    for size in (4, 3):
        run.step(size)
    run.checkpoint()
    progress = run.checkpoints[-1][0]

    seen = [reward for _, reward in recent_values(run.archive, progress, 3, ranks=2)]

    assert seen == [2.0, 4.0, 6.0]
    assert [reward for _, reward in recent_values(run.archive, progress, 9, ranks=2)] == [0.0, 2.0, 4.0, 6.0]


async def test_lost_work_whose_text_was_erased_is_known_as_forgotten(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    run = Run(archive)
    run.step(2)
    run.streams.waiting.clear()
    archive.forget("trajectory-1")
    found = await lost_work(archive, fresh_progress("unit"), run.streams)
    assert [(lost.trajectory.id, lost.forgotten) for lost in found] == [("trajectory-0", False), ("trajectory-1", True)]
