from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.archive import Archive, ArchiveError, NotArchivedError
from sao.v1 import archive_pb2 as pb
from tests.support.trajectories import good


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


def with_text(update: int, *ids: str, epoch: int = 1) -> pb.ArchivedUpdate:
    made = pb.ArchivedUpdate(run="r", update=update, trainer_epoch=epoch, metrics={"loss": 0.125})
    for one in ids:
        trained = made.trajectories.add(reward=0.5, values=[0.25], lag=2, routed_experts=b"text-routes")
        message = trained.trajectory
        message.MergeFrom(good(random.Random(1)))
        message.id, message.task_payload_json, message.prompt_id = one, f'{{"said": "text-{one}"}}', f"text-{one}"
    return made


def test_forgetting_erases_text_from_every_step_and_keeps_numbers_and_the_others(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    for number, epoch in ((1, 1), (2, 1), (2, 2)):
        archive.append(with_text(number, "one", "other", epoch=epoch))
    archive.append(with_text(3, "other"))
    untouched = (tmp_path / "update-00000003-epoch-0001.pb").stat().st_mtime_ns
    assert archive.forget("one") == 3
    assert archive.forget("one") == 0
    assert (tmp_path / "update-00000003-epoch-0001.pb").stat().st_mtime_ns == untouched
    before = with_text(2, "one", "other", epoch=2)
    gone, other = archive.read(2).trajectories
    assert other == before.trajectories[1]
    assert (gone.forgotten, gone.reward, list(gone.values), gone.lag) == (True, 0.5, [0.25], 2)
    assert b"text-one" not in b"".join(path.read_bytes() for path in tmp_path.glob("*.pb"))
    left, was = gone.trajectory, before.trajectories[0].trajectory
    assert (left.id, left.ordinal, left.turns, gone.routed_experts) == ("one", was.ordinal, was.turns, b"")
    assert not left.prompt_token_ids
    assert not any(segment.token_ids for segment in left.segments)
    assert [list(segment.logprobs) for segment in left.segments] == [list(segment.logprobs) for segment in was.segments]
    assert [(step.update, step.epoch) for step in sorted(archive.forgotten_steps())] == [(1, 1), (2, 1), (2, 2)]


def test_a_step_written_after_its_trajectory_was_forgotten_has_no_text(tmp_path: Path) -> None:
    Archive(tmp_path).forget("one")
    assert b"text-one" not in Archive(tmp_path).append(with_text(1, "one")).read_bytes()
    # Killed between the writing and the look at what is forgotten: the next start does it.
    path = tmp_path / "update-00000002-epoch-0003.pb"
    path.write_bytes(with_text(2, "one", epoch=3).SerializeToString())
    Archive(tmp_path).finish_forgetting()
    assert b"text-one" not in path.read_bytes()


def test_what_a_killed_trainer_left_half_written_goes_and_what_one_writes_now_is_waited_for(tmp_path: Path) -> None:
    torn = tmp_path / ".update-00000002-epoch-0001.pb.tmp"
    torn.write_bytes(with_text(2, "one").SerializeToString())
    with pytest.raises(ArchiveError, match="try again in a minute"):
        Archive(tmp_path).forget("one")
    os.utime(torn, (1, 1))
    assert Archive(tmp_path).forget("one") == 1
    assert not torn.exists()


def test_a_damaged_file_that_may_hold_the_text_is_named(tmp_path: Path) -> None:
    path = Archive(tmp_path).append(with_text(2, "one"))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ArchiveError, match="may hold text that is to be erased"):
        Archive(tmp_path).forget("one")
