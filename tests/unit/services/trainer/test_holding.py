"""A tripped guard holds publishing, says why, is remembered, and lets go; the critic's pre-training is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from sao.board.base import TrainerState
from sao.board.memory import MemoryBoard
from sao.report import make_report
from sao.rows import UpdateRow, read_rows
from sao.streams.memory import MemoryStreams
from sao.weights.filesystem import FileSystemVersionStore
from services.trainer.app import published
from services.trainer.core.guards import GUARD_NAMES
from services.trainer.core.update import UpdateStats
from services.trainer.schedule import Gate
from tests.support.training import ROOT, Trainer, World
from tests.unit.services.trainer.conftest import NewWorld

OTHERS = [f"guards.{name}=off" for name in GUARD_NAMES if name != "entropy_slope"]
GUARDED = ("guards.window=2", "guards.entropy_slope=0.5", *OTHERS, "checkpoint.every_updates=1")
JUMP = [1.0, 1.0, 9.0]


def rows(world: World) -> list[UpdateRow]:
    return [row for row, _ in read_rows(world.config.run.dir / "updates.jsonl")]


def with_entropies(trainer: Trainer, entropies: Sequence[float]) -> Trainer:
    """The same trainer, its policy updates having these entropies."""
    left: Iterator[float] = iter(entropies)
    finish = trainer.parts.ranks.finish

    def finish_with() -> UpdateStats:
        stats = finish()
        return replace(stats, metrics=stats.metrics | {"entropy": next(left)})

    trainer.parts.ranks.finish = finish_with  # type: ignore[method-assign]
    return trainer


def gauge(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


async def test_a_trip_holds_publishing_and_says_why_until_it_clears(new_world: NewWorld) -> None:
    world = new_world("run.updates=7", *GUARDED)
    await world.deliver_many(14)

    with capture_logs() as logs:
        await with_entropies(await world.start(), [*JUMP, 9.0, 9.0, 9.0, 9.0]).run()

    versions = [row.version for row in rows(world)]
    assert versions == ["v00000002", "v00000003", "", "", "", "v00000004", "v00000005"]
    reason = "entropy_slope 8 nats per update, limit 0.5"
    assert [row.held for row in rows(world)] == [[], [], [reason], [reason], [reason], [], []]
    (trip,) = [entry for entry in logs if entry["event"] == "publishing held"]
    assert (trip["guard"], trip["value"], trip["limit"], trip["update"]) == ("entropy_slope", 8.0, 0.5, 3)
    assert trip["serving"] == "v00000003"
    assert "checkpoint of update 1" in trip["to_do"]
    assert "trainer.lr" in trip["cause"]
    (cleared,) = [entry for entry in logs if entry["event"] == "guard cleared"]
    assert (cleared["guard"], cleared["update"]) == ("entropy_slope", 6)
    assert gauge("sao_trainer_publishing_held", guard="entropy_slope") == 0.0
    # What was not published in between is: the next version holds every update.
    record = (await world.board.versions())["v00000004"]
    assert (record.update, record.parent) == (6, "v00000003")


async def test_a_restart_remembers_and_publishes_nothing(new_world: NewWorld) -> None:
    world = new_world("run.updates=6", *GUARDED)
    await world.deliver_many(12)
    await with_entropies(await world.start(), JUMP).run_updates(3)

    await with_entropies(await world.start(), [9.0]).run_updates(1)

    assert gauge("sao_trainer_publishing_held", guard="entropy_slope") == 1.0
    assert sorted(await world.board.versions()) == [ROOT, "v00000002", "v00000003"]
    facts = await world.board.trainer()
    assert facts is not None
    assert (facts.update, facts.version, facts.epoch) == (4, "v00000003", 2)
    await with_entropies(await world.start(), [9.0, 9.0]).run()
    assert [bool(row.held) for row in rows(world)] == [False, False, True, True, True, False]
    assert rows(world)[-1].version == "v00000004"


async def test_a_looser_limit_lets_a_restart_publish_what_was_held(new_world: NewWorld) -> None:
    world = new_world("run.updates=9", *GUARDED)
    await world.deliver_many(6)
    await with_entropies(await world.start(), JUMP).run_updates(3)

    looser = new_world("run.updates=9", *GUARDED, "guards.entropy_slope=off")
    looser.board, looser.streams = world.board, world.streams
    await (await looser.start()).run_updates(0)

    record = (await world.board.versions())["v00000004"]
    assert (record.update, record.parent) == (3, "v00000003")


async def test_a_board_that_was_lost_gets_back_what_was_published_and_not_what_is_held(new_world: NewWorld) -> None:
    world = new_world("run.updates=9", *GUARDED)
    await world.deliver_many(6)
    await with_entropies(await world.start(), JUMP).run_updates(3)

    world.board = board = MemoryBoard()
    world.streams = MemoryStreams(board)
    await (await world.start()).run_updates(0)

    assert sorted(await board.versions()) == ["v00000001", "v00000002", "v00000003"]


async def test_an_epoch_that_published_nothing_is_not_used_again_when_the_board_is_lost(new_world: NewWorld) -> None:
    """Else its archived steps would be taken for those of the later life, and what they trained on for held."""
    world = new_world("run.updates=5", *GUARDED)
    await world.deliver_many(10)
    await with_entropies(await world.start(), JUMP).run_updates(3)
    second = with_entropies(await world.start(), [9.0, 9.0])
    await second.run_until_crash(second.parts.ranks, "finish", at=2)

    world.board = board = MemoryBoard()
    world.streams = MemoryStreams(board)
    third = await world.start()

    assert (second.parts.epoch, third.parts.epoch) == (2, 3)


async def test_the_last_publish_is_held_too_and_the_report_says_so(new_world: NewWorld) -> None:
    world = new_world("run.updates=3", *GUARDED)
    await world.deliver_many(6)

    with capture_logs() as logs:
        await with_entropies(await world.start(), JUMP).run()

    assert rows(world)[-1].version == ""
    (told,) = [entry for entry in logs if entry["event"] == "the newest weights are not published: held"]
    assert told["newest"] == "v00000003"
    (world.config.run.dir / "run.toml").write_text('[run]\nname = "unit"\nseed = 0\n[task]\nname = "calculator"\n')
    made = make_report(world.config.run.dir)
    assert made is not None
    assert made[0].held == ["entropy_slope 8 nats per update, limit 0.5"]


async def test_a_looser_limit_publishes_what_a_finished_run_was_held_back_with(new_world: NewWorld) -> None:
    world = new_world("run.updates=3", *GUARDED)
    await world.deliver_many(6)
    await with_entropies(await world.start(), JUMP).run()
    store = FileSystemVersionStore(world.config.versions_dir, 0)
    ended = (await world.start()).loop.progress()
    assert not published(store, ended, await world.board.versions())

    looser = new_world("run.updates=3", *GUARDED, "guards.entropy_slope=off")
    looser.board, looser.streams = world.board, world.streams
    await (await looser.start()).run()

    record = (await world.board.versions())["v00000004"]
    assert (record.update, record.parent) == (3, "v00000003")
    facts = await world.board.trainer()
    assert facts is not None
    assert (facts.version, facts.state) == ("v00000004", TrainerState.FINISHED)
    assert published(store, ended, await world.board.versions())


async def test_a_publication_that_was_never_announced_does_not_end_a_finished_run(new_world: NewWorld) -> None:
    world = new_world("run.updates=3", *GUARDED)
    await world.deliver_many(6)
    await with_entropies(await world.start(), JUMP).run()
    looser = new_world("run.updates=3", *GUARDED, "guards.entropy_slope=off")
    looser.board, looser.streams = world.board, world.streams
    await (await looser.start()).run_until_crash(world.board, "announce_version", at=1)
    store = FileSystemVersionStore(world.config.versions_dir, 0)
    assert store.manifest("v00000004").update == 3

    with capture_logs() as logs:
        last = await looser.start()

    assert not published(store, last.loop.progress(), [*await world.board.versions(), "v00000004"])
    assert [line["versions"] for line in logs if line["event"] == "rolled back an interrupted publication"] == [
        ["v00000004"]
    ]
    await last.run()
    facts = await world.board.trainer()
    assert facts is not None
    assert (facts.version, facts.state) == ("v00000005", TrainerState.FINISHED)
    assert published(store, last.loop.progress(), await world.board.versions())
    assert not published(store, last.loop.progress(), []), "a version that no board knows is not published"


PRETRAINED = ("critic.warmup_updates=1", "critic.explained_variance_window=4")


@pytest.mark.parametrize(("gate", "updates", "end"), [(-1e9, 2, Gate.PASSED), (1.0, 3, Gate.GAVE_UP)])
async def test_the_critic_trains_alone_until_its_gate_and_a_restart_changes_nothing(
    new_world: NewWorld, gate: float, updates: int, end: Gate
) -> None:
    gated = (*PRETRAINED, "critic.pretrain_trajectories=6", f"critic.pretrain_explained_variance={gate}")
    world = new_world("run.updates=1", *gated)
    await world.deliver_many(10)

    with capture_logs() as logs:
        await (await world.start()).run_updates(1)
        restarted = await world.start()
        await restarted.run()

    critic_only = [True] * (updates + 1) + [False]
    assert [row.critic_only for row in rows(world)] == critic_only
    assert [row.version for row in rows(world)][:-1] == [""] * (updates + 1)
    assert rows(world)[0].phase.startswith("critic pre-training 2/6, explained variance ")
    ended = rows(world)[updates - 1].phase
    assert ended.startswith(f"critic pre-training {end.value.replace('_', ' ')} after {2 * updates} trajectories")
    assert [row.phase for row in rows(world)[updates:]] == ["critic warm-up 1/1", ""]
    (told,) = [entry for entry in logs if entry["event"] == "critic pre-training is over"]
    assert told["log_level"] == ("info" if end is Gate.PASSED else "warning")
    assert told["result"] == ended
    pretraining = restarted.loop.progress().pretraining
    assert (pretraining.gate, pretraining.updates, pretraining.trajectories) == (end, updates, 2 * updates)
    assert gauge("sao_trainer_critic_gate_state", state=end.value) == 1.0
    assert gauge("sao_trainer_phase_active", phase="train") == 1.0
    assert gauge("sao_trainer_phase_active", phase="pretrain") == 0.0
