"""What cannot be replayed ends with exit status 2, says why and what can be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sao.archive import Archive
from sao.v1 import archive_pb2 as pb
from services.trainer.replay.app import main
from services.trainer.replay.history import ArchivedRun, spans
from tests.unit.services.trainer.replay.test_planted import plant


def step_file(folder: Path, update: int) -> Path:
    archive = Archive(folder / "archive")
    return folder / "archive" / [step for step in archive.steps() if step.update == update][-1].file_name


def no_run(folder: Path) -> None:
    (folder / "run.toml").unlink()
    no_archive(folder)


def no_run_file(folder: Path) -> None:
    for file in [folder / "run.toml", *(folder / "archive").glob("epoch-*.toml")]:
        file.unlink()


def no_archive(folder: Path) -> None:
    shutil.rmtree(folder / "archive")


def no_model(folder: Path) -> None:
    for file in (folder / "archive").glob("epoch-*.toml"):
        file.write_text(file.read_text().replace('path = "', 'path = "/nowhere'))


def no_lags(folder: Path) -> None:
    plant(folder, 4, lambda update: update.trajectories[0].version_lags.clear())


def no_component(folder: Path) -> None:
    def change(update: pb.ArchivedUpdate) -> None:
        trained = update.trajectories[0]
        trained.outcome_json = trained.outcome_json.replace('"right"', '"left"')

    plant(folder, 4, change)


def damaged(folder: Path) -> None:
    step_file(folder, 4).write_bytes(b"\xff" * 40)


def routed(folder: Path) -> None:
    plant(folder, 4, lambda update: setattr(update.trajectories[0], "routed_experts", b"\x00"))


def hole(folder: Path) -> None:
    step_file(folder, 4).unlink()


def forgotten(folder: Path) -> None:
    archive = Archive(folder / "archive")
    archive.forget(archive.read(4).trajectories[0].trajectory.id)


@pytest.mark.parametrize(
    ("damage", "update", "said"),
    [
        (no_run, 4, "holds no run"),
        (no_run_file, 4, "holds no run: expected run.toml, or archive/epoch-0004.toml"),
        (no_archive, 4, "has no archive"),
        (no_model, 4, "/nowhere"),
        (no_lags, 4, "earlier release"),
        (no_component, 4, "preference needs ['right'], the outcome has ['left']"),
        (damaged, 4, "is damaged"),
        (routed, 4, "was trained with routed experts: trainer.routing_replay is off"),
        (hole, 4, "update 4 cannot be replayed: it is not in the run's archive; those that can: 0-3, 6-7"),
        (hole, 5, "update 5 cannot be replayed: the archive lacks a step before update 5, on the way from"),
        (forgotten, 4, "update 4 cannot be replayed: update 4, on the way from update-00000003, is forgotten: text"),
        (forgotten, 5, "update 5 cannot be replayed: update 4, on the way from update-00000003, is forgotten: text"),
        (lambda _: None, 12, "update 12 cannot be replayed: it is not in the run's archive; those that can: 0-7"),
    ],
)
def test_what_cannot_be_replayed_says_so(
    run_folder: Path, damage: Callable[[Path], None], update: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run_folder)
    assert main([str(run_folder), str(update)]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert "Traceback" not in err
    assert "reproduced" not in out


def test_archived_routes_of_another_size_are_refused(
    small_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_run("trainer.routing_replay=true")
    assert main([str(folder), "4"]) == 0
    routed(folder)
    assert main([str(folder), "4"]) == 2
    assert "was trained with routed experts: 1 bytes, expected" in capsys.readouterr().err


def test_a_run_without_a_policy_update_has_none_to_draw(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run_folder / "checkpoints")
    for file in (run_folder / "archive").glob("update-*.pb"):
        if not file.name.startswith("update-00000000"):
            file.unlink()
    assert main([str(run_folder), "--random", "3"]) == 2
    assert "no update that can be replayed" in capsys.readouterr().err
    assert main([str(run_folder), "0"]) == 0


def test_who_asks_for_nothing_is_told_what_there_is(made_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(made_run)]) == 2
    said = capsys.readouterr().err
    assert "name one, or --random N; those that can be replayed: 0-7" in said


def test_an_unforeseen_error_is_not_taken_for_a_divergence(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ArchivedRun, "plan", lambda *_: 1 / 0)
    assert main([str(run_folder), "4"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_machine_without_the_trainers_packages_is_not_taken_for_a_divergence(made_run: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    command = [sys.executable, "-m", "services.trainer.replay", str(made_run), "4"]

    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "cannot replay: No module named 'torch'" in done.stderr


def test_a_warm_up_with_a_hole_cannot_be_replayed(run_folder: Path) -> None:
    (run_folder / "archive" / "update-00000000-epoch-0001.pb").unlink()
    assert ArchivedRun(run_folder).replayable() == [4, 5, 6, 7]


def test_looking_changes_nothing(run_folder: Path) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}

    before = files()
    assert main([str(run_folder), "1", "7"]) == 0
    assert files() == before


def test_numbers_in_words() -> None:
    assert spans([1, 2, 3, 5, 9, 10]) == "1-3, 5, 9-10"
    assert spans([]) == ""
