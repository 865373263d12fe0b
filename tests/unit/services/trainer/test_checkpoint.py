"""Checkpoints are whole or skipped; which of them stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trainer.checkpoint import Checkpoint, CheckpointError, CheckpointStore, Progress, Stretch


def progress(update: int, *, critic_only: int = 0, run: str = "unit") -> Progress:
    return Progress(
        run=run,
        update=update,
        critic_only=critic_only,
        consumed=update,
        unsettled_ids=["a", "b"],
        version="v00000001",
        trainer_epoch=1,
        dropped={"stale": 2},
    )


def write(directory: Path) -> None:
    (directory / "policy.safetensors").write_bytes(b"weights" * 100)
    (directory / "backend.json").write_text("{}")


def store(tmp_path: Path, *, keep_last: int = 3, keep_every: int = 0) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", "unit", keep_last, keep_every, 0)


def test_the_newest_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    for update in (1, 2):
        store(tmp_path).save(progress(update), write)
    found = store(tmp_path).newest()
    assert found is not None
    assert found.progress == progress(2)
    assert (found.backend_dir / "policy.safetensors").read_bytes() == b"weights" * 100


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert store(tmp_path).newest() is None


@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "remove", "no_manifest", "torn_manifest", "other_run", "unlisted"]
)
def test_a_damaged_newest_falls_back_to_the_one_before(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved: list[Checkpoint] = [store(tmp_path).save(progress(update), write) for update in (1, 2)]
    weights, manifest = saved[1].backend_dir / "policy.safetensors", saved[1].path / "MANIFEST.json"
    match damage:
        case "flip":
            weights.write_bytes(b"w3ights" * 100)
        case "truncate":
            weights.write_bytes(b"weights")
        case "remove":
            weights.unlink()
        case "no_manifest":
            manifest.unlink()
        case "torn_manifest":
            manifest.write_bytes(manifest.read_bytes()[:40])
        case "other_run":
            manifest.write_text(manifest.read_text().replace('"unit"', '"else"'))
        case "unlisted":
            (saved[1].backend_dir / "critic.safetensors").write_text("stranger")
    found = store(tmp_path).newest()
    assert found is not None
    assert found.progress.update == 1
    assert "update-00000002" in capsys.readouterr().out


def test_an_interrupted_save_leaves_no_trace(tmp_path: Path) -> None:
    store(tmp_path).save(progress(1), write)

    def dies(directory: Path) -> None:
        write(directory)
        msg = "no space left on device"
        raise OSError(msg)

    with pytest.raises(OSError, match="no space"):
        store(tmp_path).save(progress(2), dies)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update-00000001"]


def test_a_damaged_one_is_replaced_when_its_update_is_made_again(tmp_path: Path) -> None:
    first = store(tmp_path).save(progress(1), write)
    (first.path / "progress.json").write_text("torn")
    store(tmp_path).save(progress(1), write)
    found = store(tmp_path).newest()
    assert found is not None
    assert found.progress.update == 1


def test_the_last_ones_and_the_milestones_stay(tmp_path: Path) -> None:
    kept = store(tmp_path, keep_last=2, keep_every=4)
    for update in range(1, 12):
        kept.save(progress(update), write)
    assert kept.updates() == [4, 8, 10, 11]


def test_one_of_every_so_many_updates_stays_wherever_checkpoints_lie(tmp_path: Path) -> None:
    kept = store(tmp_path, keep_last=1, keep_every=25)
    for update in (15, 40, 52, 65, 80, 90, 115, 120):
        kept.save(progress(update), write)
    assert kept.updates() == [40, 52, 80, 115, 120]


def test_the_critics_warm_up_has_checkpoints_of_its_own(tmp_path: Path) -> None:
    for critic_only in (1, 2):
        store(tmp_path).save(progress(0, critic_only=critic_only), write)
    found = store(tmp_path).newest()
    assert found is not None
    assert found.progress.critic_only == 2
    store(tmp_path).save(progress(1, critic_only=2), write)
    found = store(tmp_path).newest()
    assert found is not None
    assert found.progress.update == 1


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    full = CheckpointStore(tmp_path / "checkpoints", "unit", 3, 0, 1 << 60)
    with pytest.raises(CheckpointError, match=r"MiB free, checkpoint.free_space_mb asks for"):
        full.save(progress(1), write)
    assert full.updates() == []


def test_what_is_saved_after_a_fall_back_stays_and_is_the_newest(tmp_path: Path) -> None:
    kept = store(tmp_path, keep_last=1, keep_every=0)
    for update in (1, 5):
        kept.save(progress(update), write)
        if update == 1:
            kept = store(tmp_path, keep_last=2)
    (tmp_path / "checkpoints" / "update-00000005" / "progress.json").write_text("torn")

    kept = store(tmp_path, keep_last=1)
    for update in (2, 3):
        kept.save(progress(update), write)
        assert kept.updates() == [update]
        found = kept.newest()
        assert found is not None
        assert found.progress.update == update


def test_a_state_of_another_branch_is_not_taken_for_this_one(tmp_path: Path) -> None:
    branches = [
        progress(2).model_copy(update={"stretches": [Stretch(trainer_epoch=epoch, update=2, critic_only=0)]})
        for epoch in (1, 2)
    ]
    for branch in branches:
        store(tmp_path).save(branch, write)
    found = store(tmp_path).newest()
    assert found is not None
    assert found.progress == branches[1]


def test_what_a_dead_process_left_unfinished_goes_with_the_next_save(tmp_path: Path) -> None:
    store(tmp_path).save(progress(1), write)
    leftover = tmp_path / "checkpoints" / ".update-00000002.x1y2z3" / "backend"
    leftover.mkdir(parents=True)
    store(tmp_path).save(progress(2), write)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["update-00000001", "update-00000002"]
