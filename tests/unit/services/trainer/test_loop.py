"""The trainer's loop over a whole life and over its death: nothing lost, nothing twice, nothing settled too early."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from prometheus_client import REGISTRY

from sao.archive import Archive
from sao.board.base import TrainerState
from sao.board.memory import MemoryBoard
from sao.config import load_run_config
from sao.config.algorithms import ALGORITHMS, AlgorithmName
from sao.curves import dropped, effective_rows
from sao.outcome import TimedOut
from sao.preference import Preference, PreferenceDocument
from sao.preference_changes import Kept
from sao.rows import UpdateRow, read_rows
from sao.streams.base import FencedError, StreamName
from sao.streams.memory import MemoryStreams
from sao.weights.filesystem import FileSystemVersionStore
from services.trainer import metrics
from services.trainer.checkpoint import CheckpointStore
from services.trainer.consumer import Position, Refused, Taken
from tests.support.training import PREFERENCE, ROOT, Trainer, World, random_trajectory
from tests.support.trajectories import ROUTING, routed_experts
from tests.support.waiting import eventually
from tests.unit.services.trainer.conftest import NewWorld


def rows(world: World) -> list[UpdateRow]:
    return [row for row, _ in read_rows(world.config.run.dir / "updates.jsonl")]


def trained_ids(world: World) -> list[str]:
    return [t.id for row in rows(world) for t in row.trajectories]


def weights_of(world: World, version: str) -> list[tuple[str, str]]:
    manifest = FileSystemVersionStore(world.config.versions_dir, 0).manifest(version)
    return sorted((tensor.name, tensor.sha256) for tensor in manifest.tensors)


async def test_each_update_takes_exactly_its_trajectories_oldest_first(new_world: NewWorld) -> None:
    world = new_world("run.updates=3")
    ids = await world.deliver_many(8)

    trainer = await world.start()
    await trainer.run()

    assert trained_ids(world) == ids[:6]
    assert [row.update for row in rows(world)] == [1, 2, 3]
    assert [len(row.trajectories) for row in rows(world)] == [2, 2, 2]
    assert await world.streams.unconsumed() == 2
    facts = await world.board.trainer()
    assert facts is not None
    assert (facts.update, facts.consumed, facts.state) == (3, 6, TrainerState.FINISHED)


async def test_a_switch_is_timed_from_its_put_and_each_version_names_its_newest_preference(
    new_world: NewWorld,
) -> None:
    world = new_world("run.updates=55")

    async def store(version: int) -> None:
        kept = [Preference(version=n, document=PREFERENCE, stored_s=time.time() - 100) for n in range(1, version + 1)]
        await world.board.restore_preferences(Kept.of([], older=kept))

    def shown(stage: str) -> float:
        return REGISTRY.get_sample_value("sao_trainer_adaptation_seconds", {"stage": stage}) or 0.0

    metrics.ADAPTATION.clear()
    await store(1)
    for _ in range(60):
        await world.deliver(reward=1.0)
    running = asyncio.ensure_future((await world.start()).run())
    await eventually(lambda: len(rows(world)) == 30, what="thirty updates", timeout_s=60)
    assert (shown("trained"), shown("recovered")) == (0.0, 0.0), "the first preference is no switch"
    await store(2)
    for _ in range(48):
        await world.deliver(reward=0.9, scored_under=2)
    await eventually(lambda: len(rows(world)) == 54, what="54 updates", timeout_s=60)
    assert 100 <= shown("trained") < 160
    assert shown("recovered") == 0.0
    for _ in range(2):
        await world.deliver(reward=0.9, scored_under=2)
    await running
    assert 100 <= shown("recovered") < 160

    store_of = FileSystemVersionStore(world.config.versions_dir, 0)
    newest = [row for row in rows(world) if row.version][-1]
    assert newest.preference_version == store_of.manifest(newest.version).preference == 2


async def test_the_critic_steps_k_times_an_update_and_alone_while_it_warms_up(new_world: NewWorld) -> None:
    world = new_world("run.updates=2", "critic.warmup_updates=3", "critic.updates_per_policy_update=2")
    await world.deliver_many(10)
    trainer = await world.start()
    steps: list[str] = []
    lrs: list[tuple[float, float]] = []

    def counted(step: Callable[[float], float], role: str) -> Callable[[float], float]:
        def call(denominator: float) -> float:
            steps.append(role)
            return step(denominator)

        return call

    for role in ("policy", "critic"):
        step = getattr(trainer.backend, f"{role}_step")
        setattr(trainer.backend, f"{role}_step", counted(step, role))
    set_lr = trainer.backend.set_lr
    trainer.backend.set_lr = lambda policy, critic: lrs.append((policy, critic)) or set_lr(policy, critic)  # type: ignore[func-returns-value,method-assign]

    await trainer.run()

    warm_up = ["critic", "critic"] * 3
    assert steps == warm_up + ["critic", "critic", "policy"] * 2
    assert [critic for _, critic in lrs] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, 1e-3])
    assert [(row.update, row.critic_only) for row in rows(world)] == [(0, True)] * 3 + [(1, False), (2, False)]
    # While only the critic learns, the policy and what is published of it stay what they were.
    assert [row.version for row in rows(world)] == ["", "", "", "v00000002", "v00000003"]
    assert weights_of(world, ROOT) != weights_of(world, "v00000002")


async def test_nothing_is_settled_before_a_checkpoint_holds_it(new_world: NewWorld) -> None:
    world = new_world("run.updates=4", "checkpoint.every_updates=3")
    ids = await world.deliver_many(8)
    trainer = await world.start()
    seen: list[tuple[int, int]] = []
    save = trainer.parts.ranks.save

    def watched_save(directory: Path) -> None:
        assert isinstance(world.streams, MemoryStreams)
        gone = sum(i not in world.streams._payloads for i in ids)
        seen.append((trainer.loop.progress().update, gone))
        save(directory)

    trainer.parts.ranks.save = watched_save  # type: ignore[method-assign]
    await trainer.run()

    assert seen == [(3, 0), (4, 6)]
    assert await world.settled(ids) == ids
    assert (await world.streams.depth(StreamName.SCORED)).length == 0


async def test_a_stop_makes_finished_updates_durable_and_gives_the_rest_back(new_world: NewWorld) -> None:
    world = new_world("run.updates=9")
    ids = await world.deliver_many(5)

    trainer = await world.start()
    await trainer.run_updates(2)

    assert await world.settled(ids) == ids[:4]
    second = await world.start()
    await world.deliver()
    await second.run_updates(1)
    assert trained_ids(world)[4] == ids[4]
    assert [row.update for row in rows(world)] == [1, 2, 3]
    facts = await world.board.trainer()
    assert facts is not None
    assert facts.state is TrainerState.TRAINING


@pytest.mark.parametrize(
    "where", ["finish", "append", "policy_state", "announce_version", "write_trainer", "save", "collect", "settle"]
)
@pytest.mark.parametrize("algorithm", ["sao", "grpo_sync", "reinforce_ma", "spo"])
async def test_after_a_crash_anywhere_training_goes_on_bit_for_bit_and_trains_nothing_twice(
    new_world: NewWorld, algorithm: AlgorithmName, where: str
) -> None:
    settings = ["run.updates=4", "checkpoint.every_updates=2", f"trainer.algorithm={algorithm}"]
    if ALGORITHMS[algorithm].in_groups:
        settings.append("group.size=2")
    straight, crashed = (new_world(*settings, folder=name) for name in ("straight", "crashed"))
    twins = [random_trajectory(straight.rng, "unit") for _ in range(8)]
    for world in (straight, crashed):
        for message in twins:
            await world.deliver(message)
    await (await straight.start()).run()

    first = await crashed.start()
    parts = first.parts
    owner = {
        "finish": parts.ranks,
        "append": parts.archive,
        "policy_state": parts.ranks,
        "announce_version": crashed.board,
        "write_trainer": crashed.board,
        "save": parts.ranks,
        "collect": CheckpointStore,
        "settle": crashed.streams,
    }[where]
    call = "_collect" if where == "collect" else where
    await first.run_until_crash(owner, call, at=1 if where in {"save", "collect", "settle"} else 4)
    second = await crashed.start()
    restored = second.loop.progress()
    await second.run()

    effective = [row for row in rows(crashed) if row.trainer_epoch == 2 or row.update <= restored.update]
    assert [row.update for row in effective] == [1, 2, 3, 4]
    assert [t.id for row in effective for t in row.trajectories] == [message.id for message in twins]
    assert await crashed.settled(twins_ids := [message.id for message in twins]) == twins_ids
    last = (await straight.board.trainer(), await crashed.board.trainer())
    assert last[0] is not None
    assert last[1] is not None
    assert last[0].consumed == last[1].consumed == 8
    assert weights_of(straight, last[0].version) == weights_of(crashed, last[1].version)
    # The explained variance goes on over its window: the archive remembers the values.
    windows = [[row.metrics.get("explained_variance") for row in found] for found in (rows(straight), effective)]
    assert windows[0] == pytest.approx(windows[1])


async def test_an_older_checkpoint_gets_from_the_archive_what_it_lacks(new_world: NewWorld) -> None:
    world = new_world("run.updates=2", "checkpoint.every_updates=1")
    ids = await world.deliver_many(4)
    await (await world.start()).run()
    assert await world.settled(ids) == ids

    newest = world.config.run.dir / "checkpoints" / "update-00000002"
    (newest / "progress.json").write_text("torn")
    second = await world.start()
    assert second.loop.progress().update == 1
    await second.run()

    assert [t.id for t in rows(world)[-1].trajectories] == ids[2:]
    archived = Archive(world.config.run.dir / "archive").read(2)
    assert [t.trajectory.id for t in archived.trajectories] == ids[2:]
    assert archived.trainer_epoch == 2


async def test_a_second_fall_back_still_finds_what_the_first_one_had_to_train_again(new_world: NewWorld) -> None:
    world = new_world("run.updates=3", "checkpoint.every_updates=1")
    ids = await world.deliver_many(6)
    await (await world.start()).run()
    for update in (2, 3):
        checkpoint = world.config.run.dir / "checkpoints" / f"update-{update:08d}"
        (checkpoint / "progress.json").write_text("torn")

    # Update 2 is made again, of one trajectory; the other one of the abandoned update 2 is still in the queue.
    smaller = new_world("run.updates=9", "trainer.trajectories_per_update=1")
    smaller.board, smaller.streams, smaller.slot = world.board, world.streams, world.slot
    await (await smaller.start()).run_updates(1)
    third = await smaller.start()
    assert third.loop.progress().update == 2
    await third.run_updates(3)

    assert [[t.id for t in row.trajectories] for row in effective_rows(rows(smaller))] == [
        ids[:2],
        *([trajectory_id] for trajectory_id in ids[2:]),
    ]


async def test_what_came_from_the_archive_and_was_dropped_does_not_come_again(new_world: NewWorld) -> None:
    world = new_world("run.updates=2", "checkpoint.every_updates=1")
    await world.deliver_many(4)
    await (await world.start()).run()
    (world.config.run.dir / "checkpoints" / "update-00000002" / "progress.json").write_text("torn")

    other = new_world("run.updates=9", "trainer.preference_policy=drop", "checkpoint.every_updates=1")
    other.board, other.streams, other.slot = world.board, world.streams, world.slot
    await other.board.put_preference(PREFERENCE)
    new = [await other.deliver(scored_under=2) for _ in range(4)]
    await (await other.start()).run_updates(1)
    await (await other.start()).run_updates(1)

    assert [t.id for row in rows(other)[-2:] for t in row.trajectories] == new
    assert rows(other)[-1].dropped == {"preference": 2}


async def test_what_was_dropped_since_a_checkpoint_that_stays_the_same_is_neither_forgotten_nor_offered_again(
    new_world: NewWorld,
) -> None:
    world = new_world("run.updates=2", "checkpoint.every_updates=1")
    await world.deliver_many(4)
    await (await world.start()).run()
    (world.config.run.dir / "checkpoints" / "update-00000002" / "progress.json").write_text("torn")
    other = new_world("run.updates=9", "trainer.preference_policy=drop", "checkpoint.every_updates=1")
    other.board, other.streams, other.slot = world.board, world.streams, world.slot
    await other.board.put_preference(PREFERENCE)

    # Stopped after both drops and before any step: the newest checkpoint holds this very state already.
    second = await other.start()
    stop_when_dropped = asyncio.ensure_future(_stop_when(second, lambda: second.parts.consumer.dropped.total() == 2))
    await second.run()
    await stop_when_dropped

    new = [await other.deliver(scored_under=2) for _ in range(2)]
    third = await other.start()
    assert third.parts.consumer.dropped == {"preference": 2}
    assert third.parts.consumer._archived == {}
    await third.run_updates(1)
    assert [t.id for t in rows(other)[-1].trajectories] == new
    assert rows(other)[-1].dropped == {"preference": 2}


async def _stop_when(trainer: Trainer, condition: Callable[[], bool]) -> None:
    await eventually(condition, what="the moment to stop")
    trainer.stop.set()


async def test_a_drop_counts_once_whatever_is_made_again_around_it(new_world: NewWorld) -> None:
    world = new_world("run.updates=4", "checkpoint.every_updates=2")
    for _ in range(2):
        await world.deliver(outcome=TimedOut(component="judge", after_s=1.0))
        await world.deliver_many(4)
    first = await world.start()
    await first.run_until_crash(first.parts.ranks, "finish", at=4)
    await (await world.start()).run()

    assert dropped(rows(world)) == rows(world)[-1].dropped == {"not_scored": 2}


async def test_a_run_that_lost_its_board_goes_on(new_world: NewWorld) -> None:
    world = new_world("run.updates=3")
    await world.deliver_many(2)
    for updates in (1, 0, 0):
        await (await world.start()).run_updates(updates)

    board = MemoryBoard()
    world.board, world.streams = board, MemoryStreams(board)
    trainer = await world.start()
    await trainer.run_updates(0)

    versions = await board.versions()
    assert sorted(versions) == [f"v{number:08d}" for number in range(1, 6)]
    newest = versions["v00000005"]
    assert (newest.update, newest.parent, newest.epoch) == (1, "v00000002", 4)


async def test_a_finished_run_ends_at_once_and_a_longer_one_goes_on(new_world: NewWorld) -> None:
    world = new_world("run.updates=1")
    await world.deliver_many(2)
    await (await world.start()).run()

    again = await world.start()
    assert again.loop.finished

    longer = new_world("run.updates=2")
    longer.board, longer.streams, longer.slot = world.board, world.streams, world.slot
    await longer.deliver_many(2)
    await (await longer.start()).run()
    assert [row.update for row in rows(longer)] == [1, 2]


async def test_a_restored_trainer_publishes_its_state_as_a_new_version_before_it_consumes(new_world: NewWorld) -> None:
    world = new_world("run.updates=2")
    await world.deliver_many(2)
    await (await world.start()).run_updates(1)
    before = await world.board.trainer()
    assert before is not None

    second = await world.start()
    await second.run_updates(0)

    record = (await world.board.versions())["v00000003"]
    assert (record.update, record.parent, record.epoch) == (1, before.version, 2)
    assert weights_of(world, "v00000003") == weights_of(world, before.version)


async def test_a_first_version_that_was_never_announced_is_nobodys(new_world: NewWorld) -> None:
    world = new_world("run.updates=1")
    await (await world.start()).run_until_crash(world.board, "announce_version", at=1)
    for _ in range(2):
        await world.deliver(random_trajectory(world.rng, "unit", version="v00000002"))

    await (await world.start()).run()

    records = sorted((await world.board.versions()).values(), key=lambda record: record.name)
    assert [(record.name, record.parent) for record in records] == [("v00000002", None), ("v00000003", "v00000002")]
    facts = await world.board.trainer()
    assert facts is not None
    assert (facts.version, facts.consumed) == ("v00000003", 2)


async def test_a_starved_trainer_checkpoints_so_that_finished_work_is_settled(new_world: NewWorld) -> None:
    world = new_world("run.updates=9", "checkpoint.starved_after_s=0.05")
    ids = await world.deliver_many(3)
    trainer = await world.start()
    saves: list[Path] = []
    save = trainer.parts.ranks.save
    trainer.parts.ranks.save = lambda directory: saves.append(directory) or save(directory)  # type: ignore[func-returns-value,method-assign]

    settle = trainer.parts.consumer.settle

    async def settle_and_stop(trajectory_ids: Iterable[str]) -> int:
        trainer.stop.set()
        return await settle(trajectory_ids)

    trainer.parts.consumer.settle = settle_and_stop  # type: ignore[method-assign]
    await trainer.run()

    # The third is of an unfinished update: it stays on the stream, and no second checkpoint of update 1 was written.
    assert await world.settled(ids) == ids[:2]
    assert len(saves) == 1


async def test_refusals_without_end_neither_keep_finished_work_unsettled_nor_the_other_ranks_waiting(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while publishing is held: rollouts come, all of them stale."""
    world = new_world("run.updates=9", "checkpoint.starved_after_s=100", "trainer.stale_policy=drop")
    ids = await world.deliver_many(2)
    trainer = await world.start()
    now = iter(range(0, 10**6, 30))
    monkeypatch.setattr(trainer.loop, "_clock", lambda: float(next(now)))
    heartbeats: list[int] = []
    monkeypatch.setattr(trainer.parts.ranks, "heartbeat", lambda: heartbeats.append(1))
    take, refused = trainer.parts.batcher.next, itertools.count()

    async def stale_from_the_third_on(position: Position, *, block_ms: int) -> list[Taken] | Refused | None:
        if position.update == 0:
            return await take(position, block_ms=block_ms)
        if next(refused) == 20:
            trainer.stop.set()
        elif await world.settled(ids):
            settled.append(True)
        return Refused("one", "stale")

    settled: list[bool] = []
    monkeypatch.setattr(trainer.parts.batcher, "next", stale_from_the_third_on)
    await trainer.run()

    assert len(heartbeats) > 5
    assert settled, "the finished update was settled before the end"


async def test_too_many_unsettled_bytes_force_a_checkpoint(new_world: NewWorld) -> None:
    world = new_world("run.updates=2", "checkpoint.unacked_mb_max=1")
    trainer = await world.start()
    for _ in range(4):
        message = random_trajectory(world.rng, "unit")
        message.task_payload_json = '{"x": "' + "x" * 700_000 + '"}'
        await world.deliver(message)
    await trainer.run()
    assert trainer.parts.checkpoints.updates() == [1, 2]


async def test_a_trainer_that_was_replaced_settles_nothing(new_world: NewWorld) -> None:
    world = new_world("run.updates=2")
    ids = await world.deliver_many(2)
    old = await world.start()
    await world.board.new_trainer_epoch()
    with pytest.raises(FencedError):
        await old.run()
    assert await world.settled(ids) == []


async def test_weights_that_are_not_finite_are_not_published(new_world: NewWorld) -> None:
    world = new_world("run.updates=2")
    await world.deliver_many(4)
    trainer = await world.start()
    state = trainer.parts.ranks.policy_state

    def poisoned() -> dict[str, torch.Tensor]:
        tensors = state()
        if trainer.loop.progress().update == 1:
            next(iter(tensors.values()))[0, 0] = float("nan")
        return tensors

    trainer.parts.ranks.policy_state = poisoned  # type: ignore[method-assign]
    await trainer.run()
    assert [row.version for row in rows(world)] == ["", "v00000002"]
    assert (await world.board.versions())["v00000002"].parent == ROOT


async def test_the_archive_holds_what_was_trained(new_world: NewWorld) -> None:
    world = new_world("run.updates=1")
    await world.deliver_many(2)
    await (await world.start()).run()

    archived = Archive(world.config.run.dir / "archive").read(1)
    assert archived.version_before == ROOT
    assert archived.preference_version == 1
    for trained in archived.trajectories:
        actions = sum(len(s.token_ids) for s in trained.trajectory.segments if s.logprobs)
        lengths = {len(trained.values), len(trained.advantages), len(trained.ratios), len(trained.weights)}
        assert lengths == {actions}
        assert (dict(trained.version_lags), trained.copies, trained.trained_under) == ({ROOT: 0}, 1, 1)
    assert [t.reward for t in archived.trajectories] == [0.0, 1.0]
    assert archived.metrics["dis_accepted_fraction"] >= 0
    assert (archived.critic_only, archived.skipped) == (False, False)
    assert (archived.policy_lr, archived.critic_lr) == (1e-3, 1e-3)
    assert PreferenceDocument.model_validate_json(archived.preference_json) == PREFERENCE


async def test_the_archive_holds_the_run_file_of_each_epoch(new_world: NewWorld) -> None:
    world = new_world("run.updates=2")
    await world.deliver_many(4)
    await (await world.start()).run_updates(1)
    later = new_world("run.updates=2", "trainer.eps_high=0.25")
    later.board, later.streams = world.board, world.streams
    await (await later.start()).run()

    archive = Archive(world.config.run.dir / "archive")
    assert [load_run_config(archive.run_file(epoch), env={}) for epoch in (1, 2)] == [world.config, later.config]


async def test_warm_up_steps_are_archived_as_such(new_world: NewWorld) -> None:
    world = new_world("run.updates=1", "critic.warmup_updates=2")
    await world.deliver_many(6)
    await (await world.start()).run()

    archive = Archive(world.config.run.dir / "archive")
    made = [*archive.read_steps(0), *archive.read_steps(1)]
    assert [step.critic_only for step in made] == [True, True, False]
    assert [step.critic_lr for step in made] == [5e-4, 1e-3, 1e-3]


async def test_routes_are_trained_on_archived_and_come_back_from_the_archive(new_world: NewWorld) -> None:
    world = new_world("run.updates=1", "checkpoint.every_updates=1", "trainer.routing_replay=true")
    records = []
    for _ in range(2):
        message = random_trajectory(world.rng, "unit")
        records.append(routed_experts(world.rng, message, ROUTING))
        await world.deliver(message, routed_experts=records[-1])
    await (await world.start()).run()
    (first,) = rows(world)
    assert 0 < first.metrics["routing_disagreement"] <= 1
    archive = Archive(world.config.run.dir / "archive")
    assert [trained.routed_experts for trained in archive.read(1).trajectories] == records

    (world.config.run.dir / "checkpoints" / "update-00000001" / "progress.json").write_text("torn")
    await (await world.start()).run()
    again = archive.read(1)
    assert again.trainer_epoch == 2
    assert [trained.routed_experts for trained in again.trajectories] == records
    assert rows(world)[-1].metrics["routing_disagreement"] == first.metrics["routing_disagreement"]


async def test_a_torn_last_row_is_cut_off_before_the_next_is_written(new_world: NewWorld) -> None:
    world = new_world("run.updates=2")
    await world.deliver_many(4)
    await (await world.start()).run_updates(1)
    with (world.config.run.dir / "updates.jsonl").open("ab") as file:
        file.write(b'{"update": 2, "tor')
    await (await world.start()).run()
    assert [row.update for row in rows(world)][-1] == 2
