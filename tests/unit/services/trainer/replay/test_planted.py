"""One planted change, and the replay names it: where it is and what it usually means."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file

from sao.archive import Archive
from sao.atomic import write_file
from sao.preference import PreferenceDocument
from sao.trajectory import Trajectory
from sao.v1 import archive_pb2 as pb
from sao.v1 import trajectory_pb2
from services.trainer.replay.app import main
from services.trainer.replay.compare import Divergence, Tolerance
from tests.unit.services.trainer.replay.conftest import SKIPPED
from tests.unit.services.trainer.replay.test_replay import ALL, replayed, seal

LOOSE = Tolerance(1e-4, 1e-5)
AT = 4
Change = Callable[[pb.ArchivedUpdate], object]
Position = Callable[[trajectory_pb2.Trajectory], int]


def plant(folder: Path, update: int, change: Change) -> pb.ArchivedUpdate:
    """Change an archived update of the effective history; what it is now."""
    archive = Archive(folder / "archive")
    name = [step for step in archive.steps() if step.update == update][-1]
    message = archive.load(name)
    change(message)
    write_file(folder / "archive" / name.file_name, message.SerializeToString())
    return message


def found(folder: Path, *updates: int) -> Divergence:
    report = replayed(folder, updates, LOOSE)
    assert report.divergence is not None
    assert not report.reproduced
    assert report.updates[-1].divergence == report.divergence
    return report.divergence


def _logprob(update: pb.ArchivedUpdate) -> None:
    update.trajectories[1].trajectory.segments[2].logprobs[1] -= 0.01


def _token(update: pb.ArchivedUpdate) -> None:
    ids = update.trajectories[1].trajectory.prompt_token_ids
    ids[1] = 9 if ids[1] != 9 else 8


def _reward(update: pb.ArchivedUpdate) -> None:
    update.trajectories[1].reward += 0.01


def _component(update: pb.ArchivedUpdate) -> None:
    outcome = json.loads(update.trajectories[1].outcome_json)
    outcome["components"]["right"] += 0.01
    update.trajectories[1].outcome_json = json.dumps(outcome)


def _preference(update: pb.ArchivedUpdate) -> None:
    document = PreferenceDocument.model_validate_json(update.preference_json)
    update.preference_json = document.model_copy(update={"offset": 0.26}).model_dump_json()


def _lag(update: pb.ArchivedUpdate) -> None:
    update.trajectories[1].lag += 1


def _fresher(update: pb.ArchivedUpdate) -> None:
    update.trajectories[1].version_lags["v00000001"] = 0


def _copies(update: pb.ArchivedUpdate) -> None:
    update.trajectories[1].copies = 2


def _per_token(name: str) -> Change:
    def change(update: pb.ArchivedUpdate) -> None:
        numbers = getattr(update.trajectories[1], name)
        numbers[4] = 1.01 * numbers[4] + 0.001

    return change


def _metric(name: str) -> Change:
    def change(update: pb.ArchivedUpdate) -> None:
        update.metrics[name] *= 1.01

    return change


def _action(number: int) -> Position:
    """Position of an action token, counting from 0."""
    return lambda message: [t for t, sampled in enumerate(Trajectory(message).action_mask) if sampled][number]


def _second_of_the_second_turn(message: trajectory_pb2.Trajectory) -> int:
    return len(message.prompt_token_ids) + sum(len(segment.token_ids) for segment in message.segments[:2]) + 1


ALONE = "this number was changed"


@pytest.mark.parametrize(
    ("change", "quantity", "token", "means"),
    [
        (_logprob, "ratios", _second_of_the_second_turn, "one token's alone"),
        (_token, "values", _action(0), "tokens were changed"),
        (_per_token("values"), "values", _action(4), ALONE),
        (_per_token("advantages"), "advantages", _action(4), ALONE),
        (_per_token("ratios"), "ratios", _action(4), ALONE),
        (_per_token("weights"), "weights", _action(4), ALONE),
        (lambda update: update.trajectories[1].values.pop(), "values", _action(-1), ALONE),
    ],
)
def test_a_changed_token_is_named(run_folder: Path, change: Change, quantity: str, token: Position, means: str) -> None:
    trajectory = plant(run_folder, AT, change).trajectories[1].trajectory

    first = found(run_folder, AT)

    assert (first.update, first.trajectory, first.quantity) == (AT, trajectory.id, quantity)
    assert first.token == token(trajectory)
    assert means in first.meaning


@pytest.mark.parametrize(
    ("change", "quantity", "which", "means"),
    [
        (_reward, "reward", 1, ALONE),
        (_component, "reward", 1, "raw components"),
        (_preference, "reward", 0, "preference document"),
        (_lag, "lag", 1, ALONE),
        (_fresher, "lag", 1, "lags of its versions"),
        (_copies, "copies", 1, ALONE),
    ],
)
def test_a_changed_trajectory_is_named(run_folder: Path, change: Change, quantity: str, which: int, means: str) -> None:
    changed = plant(run_folder, AT, change)

    first = found(run_folder, AT)

    assert (first.update, first.quantity, first.token) == (AT, quantity, None)
    assert first.trajectory == changed.trajectories[which].trajectory.id
    assert means in first.meaning


METRICS = ("critic_loss", "policy_loss", "critic_grad_norm", "policy_grad_norm", "entropy", "explained_variance")


@pytest.mark.parametrize("name", METRICS)
def test_a_changed_metric_is_named(run_folder: Path, name: str) -> None:
    plant(run_folder, AT, _metric(name))
    first = found(run_folder, AT)
    assert (first.update, first.trajectory, first.quantity, first.token) == (AT, "", name, None)
    assert ALONE in first.meaning


def test_a_metric_that_is_missing_or_one_too_many_is_named(run_folder: Path) -> None:
    plant(run_folder, AT, lambda update: update.metrics.pop("kl_reference"))
    missing = found(run_folder, AT)
    assert (missing.quantity, missing.logged) == ("kl_reference", None)
    replayed_kl = missing.replayed
    assert isinstance(replayed_kl, float)
    plant(run_folder, AT, lambda update: update.metrics.update(kl_reference=replayed_kl, unheard_of=1.0))
    assert found(run_folder, AT).quantity == "unheard_of"


def test_an_update_that_says_wrongly_that_it_was_skipped_is_named(run_folder: Path) -> None:
    def skipped(update: pb.ArchivedUpdate) -> None:
        update.skipped, update.skipped_reason = True, "gradient of the policy is not finite"

    plant(run_folder, AT, skipped)
    first = found(run_folder, AT)
    assert (first.quantity, first.replayed) == ("skipped", "no")
    plant(run_folder, SKIPPED, lambda update: setattr(update, "skipped_reason", "weariness"))
    assert found(run_folder, SKIPPED).replayed == "yes: loss of the first pass is not finite"


@pytest.mark.parametrize("name", ["policy_lr", "critic_lr"])
def test_a_learning_rate_that_was_changed_is_named(run_folder: Path, name: str) -> None:
    plant(run_folder, AT, lambda update: setattr(update, name, 1.001 * getattr(update, name)))
    first = found(run_folder, AT)
    assert (first.update, first.quantity) == (AT, name)
    assert ALONE in first.meaning


@pytest.mark.parametrize(
    ("role", "section", "quantity"), [("policy", "trainer", "ratios"), ("critic", "critic", "values")]
)
def test_a_step_at_another_rate_than_it_says_shows_in_the_next_update(
    run_folder: Path, role: str, section: str, quantity: str
) -> None:
    archive = Archive(run_folder / "archive")
    for update in (AT, AT + 1):
        plant(run_folder, update, lambda update: setattr(update, f"{role}_lr", 2e-3))
    file = archive.run_file(archive.read(AT).trainer_epoch)
    tables = tomllib.loads(file.read_text())
    tables[section]["lr"] = 2e-3
    file.write_text(tomli_w.dumps(tables))

    first = found(run_folder, AT, AT + 1)

    assert (first.update, first.quantity) == (AT + 1, quantity)
    assert f"only the {role} differs" in first.meaning


@pytest.mark.parametrize(
    ("role", "tensor", "quantity"),
    [("policy", "model.lm_head.weight", "ratios"), ("critic", "head.weight", "values")],
)
def test_a_changed_weight_of_a_checkpoint_shows_in_the_update_after_it(
    run_folder: Path, role: str, tensor: str, quantity: str
) -> None:
    checkpoint = run_folder / "checkpoints" / "update-00000003"
    file = checkpoint / "backend" / f"{role}.safetensors"
    tensors = load_file(file)
    tensors[tensor] += 0.01 * torch.ones_like(tensors[tensor]).cumsum(0)
    save_file(tensors, file)
    assert {update.origin for update in replayed(run_folder, [5]).updates} == {"initial model"}, "the manifest differs"

    seal(checkpoint)
    first = found(run_folder, *ALL)

    assert (first.update, first.quantity) == (4, quantity)
    assert f"only the {role} differs" in first.meaning


def test_a_baseline_that_was_changed_shows_in_the_advantages(small_run: Callable[..., Path]) -> None:
    folder = small_run("trainer.algorithm=reinforce_ma")
    progress = folder / "checkpoints" / "update-00000002" / "progress.json"
    books = json.loads(progress.read_text())
    books["baseline"] = {prompt: [0.5] for prompt in books["baseline"]}
    progress.write_text(json.dumps(books))
    seal(progress.parent)

    first = found(folder, 3)

    assert (first.update, first.quantity) == (3, "advantages")
    assert "baseline" in first.meaning


def test_nothing_after_the_first_divergence_is_made(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(run_folder, AT, _metric("policy_loss"))
    plant(run_folder, 7, _metric("policy_loss"))

    assert main([str(run_folder), "7", "5", "2"]) == 1

    text = capsys.readouterr().out
    assert "diverged first at update 4: policy_loss: logged" in text
    assert "update 4, from update-00000003" in text, "its table, though nobody asked for it"
    assert "7 steps" not in text
    assert "not reached: 5, 7" in text
    report = replayed(run_folder, [2, 5, 7], LOOSE)
    assert [update.update for update in report.updates] == [0, 0, 1, 2, 4]


def test_numbers_of_one_rank_are_not_compared_with_those_of_all(run_folder: Path) -> None:
    """With several ranks the metrics of tokens are logged of rank 0's share; everything else still counts."""
    for file in (run_folder / "archive").glob("epoch-*.toml"):
        file.write_text(file.read_text().replace("ranks = 1", "ranks = 2"))
    plant(run_folder, AT, _metric("entropy"))
    assert replayed(run_folder, [AT], LOOSE).reproduced
    plant(run_folder, AT, _metric("policy_grad_norm"))
    assert found(run_folder, AT).quantity == "policy_grad_norm"
