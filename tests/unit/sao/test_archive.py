from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.archive import Archive, ArchiveError, NotArchivedError
from sao.v1 import archive_pb2 as pb


def step(update: int, epoch: int = 1, *, reward: float = 0.5) -> pb.ArchivedUpdate:
    trajectory = pb.TrainedTrajectory(reward=reward, values=[0.25, 0.5], ratios=[1.0, 1.5], lag=2)
    trajectory.trajectory.id = f"t{update}"
    return pb.ArchivedUpdate(
        run="r", update=update, trainer_epoch=epoch, trajectories=[trajectory], metrics={"loss": 0.125}, finished_s=12.5
    )


def test_an_update_reads_back_as_it_was_written(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive")
    path = archive.append(step(7, 3))
    assert path.name == "update-00000007-epoch-0003.pb"
    assert archive.read(7) == step(7, 3)
    assert Archive(tmp_path / "archive").read(7) == step(7, 3)


def test_the_newest_epoch_counts_and_the_older_stays(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.append(step(5, 1, reward=0.0))
    archive.append(step(5, 2, reward=1.0))
    assert archive.read(5).trajectories[0].reward == 1.0
    assert [kept.trainer_epoch for kept in archive.read_history(5)] == [1, 2]
    assert archive.updates() == [5]
    assert len(list(tmp_path.iterdir())) == 2


def test_steps_that_end_at_the_same_update_are_all_kept(tmp_path: Path) -> None:
    """The critic's warm-up makes several steps at update 0; none may overwrite another."""
    archive = Archive(tmp_path)
    for reward in (0.0, 0.25, 0.5):
        archive.append(step(0, 1, reward=reward))
    assert [kept.trajectories[0].reward for kept in archive.read_steps(0)] == [0.0, 0.25, 0.5]
    assert archive.read(0).trajectories[0].reward == 0.5
    archive.append(step(0, 2, reward=1.0))
    assert [kept.trajectories[0].reward for kept in archive.read_steps(0)] == [1.0]


def test_pruning_removes_what_lies_below_and_nothing_else(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    for update in (1, 2, 2, 3, 4):
        archive.append(step(update, update % 2 + 1))
    (tmp_path / "notes.txt").write_text("keep")
    assert archive.prune(3) == [1, 2]
    assert archive.updates() == [3, 4]
    assert (tmp_path / "notes.txt").exists()
    assert archive.prune(3) == []


def test_a_half_written_file_of_a_crash_is_invisible_and_goes_with_the_next_prune(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    torn = tmp_path / ".update-00000009-epoch-0001.pb.tmp"
    torn.write_bytes(b"half")
    assert archive.updates() == []
    archive.prune(0)
    assert not torn.exists()


def test_what_is_not_there_is_named_with_what_is(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    with pytest.raises(NotArchivedError, match=r"update 3 .* is empty"):
        archive.read(3)
    archive.append(step(4))
    with pytest.raises(KeyError, match=r"update 3 .* 4 to 4"):
        archive.read(3)


@pytest.mark.parametrize("content", [b"", step(5).SerializeToString(), step(4, 2).SerializeToString()])
def test_a_file_that_holds_another_step_than_its_name_says_is_refused(tmp_path: Path, content: bytes) -> None:
    archive = Archive(tmp_path)
    archive.append(step(4)).write_bytes(content)
    with pytest.raises(ArchiveError, match=r"update-00000004-epoch-0001\.pb holds update"):
        archive.read(4)


def test_the_newest_epoch_is_known_by_its_steps_and_by_its_run_file(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    assert archive.newest_epoch() == 0
    archive.append(step(4, 3))
    assert archive.newest_epoch() == 3
    archive.write_run_file(5, "")
    assert archive.newest_epoch() == 5


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    path = archive.append(step(4))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ArchiveError, match=r"update-00000004-epoch-0001\.pb is damaged"):
        archive.read(4)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 3)), max_size=20), st.integers(0, 12))
def test_after_any_history_each_update_reads_its_last_step(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[int, int]], below: int
) -> None:
    archive = Archive(tmp_path_factory.mktemp("archive"))
    last: dict[int, tuple[int, float]] = {}
    for number, (update, epoch) in enumerate(history):
        archive.append(step(update, epoch, reward=float(number)))
        if epoch >= last.get(update, (0, 0.0))[0]:
            last[update] = (epoch, float(number))
    archive.prune(below)
    expected = {update: value for update, value in last.items() if update >= below}
    assert archive.updates() == sorted(expected)
    found = {update: archive.read(update) for update in archive.updates()}
    assert {update: (kept.trainer_epoch, kept.trajectories[0].reward) for update, kept in found.items()} == expected
