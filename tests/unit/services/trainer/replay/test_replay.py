"""What a run made comes out again bit for bit, whatever happened to it; what was abandoned is never looked at."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from rich.progress import Progress

from sao.archive import Archive
from sao.curves import effective_rows
from sao.rows import CRITIC_ONLY, read_rows
from services.trainer.replay.app import drawn, main, replay
from services.trainer.replay.compare import OF_THE_MOMENT, Tolerance
from services.trainer.replay.history import ArchivedRun
from services.trainer.replay.report import ReplayReport
from tests.unit.services.trainer.replay.conftest import SKIPPED

EXACT = Tolerance(0.0, 0.0)
ALL = range(8)


def replayed(folder: Path, updates: Collection[int], tolerance: Tolerance = EXACT) -> ReplayReport:
    return replay(ArchivedRun(folder), sorted(updates), tolerance, Progress(disable=True))


def test_every_update_of_the_effective_history_comes_out_bit_for_bit(made_run: Path) -> None:
    report = replayed(made_run, ALL)

    assert report.reproduced
    effective = effective_rows(row for row, _ in read_rows(made_run / "updates.jsonl"))
    made = [(update.update, update.critic_only, update.trainer_epoch) for update in report.updates]
    assert made == [(*row.position, row.trainer_epoch) for row in effective]
    assert [epoch for _, _, epoch in made] == [1, 1, 1, 1, 2, 4, 4, 4, 4]
    assert max(row.largest_difference for update in report.updates for row in update.quantities) == 0.0
    # The run was what it was meant to be: masked tokens, a re-weighted reward, a skipped update, abandoned steps.
    archive = Archive(made_run / "archive")
    assert len(archive.steps()) == len(effective) + 4
    assert 0 < archive.read(SKIPPED).metrics["dis_stale_fraction"] < 1
    assert archive.read(SKIPPED).skipped
    assert {t.trained_under for t in archive.read(7).trajectories} == {2}


def test_each_stretch_begins_at_the_nearest_checkpoint_and_is_made_once(made_run: Path) -> None:
    report = replayed(made_run, [2, 4, 5, 7])

    origins = [(update.update, update.origin, update.wanted) for update in report.updates]
    initial, third, fifth = "initial model", "update-00000003", "update-00000005"
    assert origins == [
        *((0, initial, False), (0, initial, False), (1, initial, False), (2, initial, True)),
        *((4, third, True), (5, third, True)),
        *((6, fifth, False), (7, fifth, True)),
    ]


def test_every_metric_that_is_a_function_of_the_trajectories_is_compared(made_run: Path) -> None:
    (update,) = replayed(made_run, [4]).updates
    logged = Archive(made_run / "archive").read(4)

    compared = {row.quantity for row in update.quantities}
    assert set(logged.metrics) - compared == OF_THE_MOMENT & set(logged.metrics)
    assert {"entropy", "kl_reference", "explained_variance", "policy_grad_norm", CRITIC_ONLY} <= compared


def test_a_run_that_was_never_checkpointed_begins_at_the_initial_model(made_run: Path, run_folder: Path) -> None:
    for checkpoint in (run_folder / "checkpoints").iterdir():
        (checkpoint / "MANIFEST.json").unlink()

    report = replayed(run_folder, [7])

    assert report.reproduced
    assert {update.origin for update in report.updates} == {"initial model"}
    assert [update.trainer_epoch for update in report.updates] == [1, 1, 1, 1, 2, 4, 4, 4, 4]


def test_a_folder_that_no_supervisor_wrote_is_replayed_too(run_folder: Path) -> None:
    """In a cluster the run file lies elsewhere; the archive has it."""
    (run_folder / "run.toml").unlink()

    assert replayed(run_folder, [4]).reproduced


def test_a_checkpoint_of_an_abandoned_branch_is_no_beginning(run_folder: Path) -> None:
    """As while a trainer that has fallen back has not saved yet."""
    progress = run_folder / "checkpoints" / "update-00000003" / "progress.json"
    fallen = json.loads(progress.read_text())
    fallen["stretches"] = [{"trainer_epoch": 1, "update": 3, "critic_only": 2}]
    progress.write_text(json.dumps(fallen))
    seal(progress.parent)

    report = replayed(run_folder, [4])

    assert {update.origin for update in report.updates} == {"initial model"}
    assert report.reproduced


def seal(checkpoint: Path) -> None:
    """Make the manifest agree with what the files are now."""
    from services.trainer.checkpoint import _describe

    path = checkpoint / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = [_describe(checkpoint, checkpoint / f["name"]).model_dump() for f in manifest["files"]]
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "settings",
    [
        ("trainer.algorithm=grpo_dis", "group.size=2"),
        ("trainer.algorithm=grpo_async", "group.size=2", "ppo.minibatches=2"),
        ("trainer.algorithm=vapo", "trainer.nll_coef=0.1"),
        ("trainer.algorithm=reinforce_ma",),
        ("trainer.algorithm=spo",),
        ("trainer.routing_replay=true", "trainer.algorithm=grpo_async", "group.size=2", "ppo.minibatches=2"),
        ("trainer.routing_replay=true", "trainer.advantage_norm=whiten"),
        ("trainer.advantage_norm=whiten", "trainer.loss_aggregation=sequence_mean", "trainer.entropy_coef=0.01"),
    ],
    ids=lambda settings: settings[0],
)
def test_every_algorithm_is_replayed_from_a_checkpoint_with_what_it_remembers(
    small_run: Callable[..., Path], settings: tuple[str, ...]
) -> None:
    report = replayed(small_run(*settings), [1, 2, 3, 4])

    assert report.reproduced
    assert [update.origin for update in report.updates] == ["initial model"] * 2 + ["update-00000002"] * 2
    assert all(update.action_tokens > 0 for update in report.updates)


def test_the_critics_pre_training_is_replayed_as_it_went(small_run: Callable[..., Path]) -> None:
    gated = "critic.pretrain_trajectories=8", "critic.explained_variance_window=8"
    report = replayed(small_run(*gated, "critic.warmup_updates=1", "run.updates=1"), [0, 1])

    assert report.reproduced
    assert [(update.update, update.critic_only) for update in report.updates] == [(0, 1), (0, 2), (0, 3), (1, 3)]


def test_what_is_drawn_follows_from_the_seed_and_can_be_replayed(made_run: Path) -> None:
    run = ArchivedRun(made_run)
    assert sorted(drawn(run, 3, 0)) == sorted(drawn(run, 3, 0)) != sorted(drawn(run, 3, 1))
    assert sorted(drawn(run, 20, 0)) == [1, 2, 3, 4, 5, 6, 7]


def test_the_command_prints_tables_and_one_object(made_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(made_run), "4"]) == 0
    text = capsys.readouterr().out
    assert "update 4, from update-00000003: 2 trajectories" in text
    assert "reproduced: update 4" in text
    assert main([str(made_run), "--random", "7", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["reproduced"], report["divergence"], len(report["wanted"])) == (True, None, 7)
    assert main([str(made_run), "0", "1", "3", "5"]) == 0
    lines = capsys.readouterr().out
    assert "0, critic-only 2" in lines
    assert "reproduced: update 0-1, 3, 5; 7 steps re-applied" in lines
