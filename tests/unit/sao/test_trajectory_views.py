"""What people see of a trajectory, against the archive and the rows that it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from sao.archive import Archive
from sao.rows import find_row
from sao.run_history import RunHistory
from sao.trajectory import Trajectory
from sao.trajectory_views import PlaceError, TrajectoryReader, TrajectoryView, place_at, summary_of_entry
from sao.v1 import archive_pb2 as pb
from tests.support.console_run import TOKENIZER, fill_folder
from tests.support.rollouts import recorded

UPDATES, ARCHIVED = 12, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    fill_folder(root, UPDATES, switched_at=8, archived=ARCHIVED)
    return root


@pytest.fixture(scope="module")
def history(folder: Path) -> RunHistory:
    found = RunHistory(folder / "updates.jsonl")
    found.poll()
    return found


def reader(folder: Path) -> TrajectoryReader:
    return TrajectoryReader(folder, TOKENIZER, max_lag=4)


def archived(folder: Path, update: int) -> pb.TrainedTrajectory:
    return Archive(folder / "archive").read(update).trajectories[1]


@pytest.mark.parametrize("limit", [1, 3, 4, 5, 7, 48, 100])
def test_pages_of_any_size_make_the_whole_list(folder: Path, history: RunHistory, limit: int) -> None:
    seen: list[str] = []
    place = None
    while True:
        page = reader(folder).page(place, limit, history)
        seen += [one.id for one in page.trajectories]
        assert len(page.trajectories) <= limit
        if page.next is None:
            break
        place = page.next

    rows = [find_row(folder / "updates.jsonl", one) for one in seen]
    assert [row.update for row in rows if row] == sorted((row.update for row in rows if row), reverse=True)
    assert len(seen) == len(set(seen)) == 4 * UPDATES


def test_a_place_that_no_page_named_is_refused(folder: Path, history: RunHistory) -> None:
    for place in ("", "7", "5.3", "x.1", "999999999.1", "-1.0"):
        with pytest.raises(PlaceError, match="next"):
            reader(folder).page(place, 3, history)


def test_an_abandoned_update_is_not_listed(tmp_path: Path) -> None:
    fill_folder(tmp_path, 3)
    text = (tmp_path / "updates.jsonl").read_text().splitlines(keepends=True)
    again = text[1].replace('"trainer_epoch":1', '"trainer_epoch":2')
    (tmp_path / "updates.jsonl").write_text("".join([*text, again]))
    history = RunHistory(tmp_path / "updates.jsonl")
    history.poll()

    page = reader(tmp_path).page(None, 100, history)
    assert [one.update for one in page.trajectories] == [2] * 4 + [1] * 4


def test_a_fresh_run_has_an_empty_list(tmp_path: Path) -> None:
    page = reader(tmp_path).page(None, 5, RunHistory(tmp_path / "updates.jsonl"))
    assert (page.trajectories, page.next) == ([], None)
    assert reader(tmp_path).trained("nobody") is None
    assert not (tmp_path / "archive").exists()


def test_every_number_of_a_token_is_the_one_the_update_computed(folder: Path) -> None:
    trained = archived(folder, UPDATES)
    made = Trajectory(trained.trajectory)
    view = reader(folder).trained(made.id)
    assert view is not None

    tokens = [token for segment in view.segments for token in segment.tokens]
    assert [token.token_id for token in tokens] == made.token_ids
    assert [token.position for token in tokens] == list(range(len(made.token_ids)))
    sampled = [token for token, action in zip(tokens, made.action_mask, strict=True) if action]
    assert [token.advantage for token in sampled] == list(trained.advantages)
    assert [token.value for token in sampled] == list(trained.values)
    assert [token.ratio for token in sampled] == list(trained.ratios)
    assert [token.weight for token in sampled] == list(trained.weights)
    assert [token.logprob for token in sampled] == list(trained.trajectory.segments[0].logprobs)
    assert [token.version for token in sampled] == [name for name in made.versions if name]
    assert view.largest_advantage == max(map(abs, trained.advantages))
    assert all(token.advantage is None and token.version is None for token in tokens if token not in sampled)


def test_a_token_is_masked_without_weight_and_stale_beyond_the_lag(folder: Path) -> None:
    trained = archived(folder, UPDATES)
    view = reader(folder).trained(trained.trajectory.id)
    assert view is not None
    sampled = view.segments[1].tokens

    assert [token.position - 3 for token in sampled if token.masked] == [0, 4]
    assert [token.position - 3 for token in sampled if token.stale] == [0]
    assert [token.lag for token in sampled[:2]] == [6, 1]


def test_the_whole_says_under_what_it_was_scored_and_trained(folder: Path) -> None:
    trained = archived(folder, UPDATES)
    view = reader(folder).trained(trained.trajectory.id)
    assert view is not None

    assert (view.summary.scored_under, view.summary.trained_under, view.preference) == (2, 2, "classical")
    assert (view.version_before, view.trainer_epoch) == (f"v{UPDATES - 1:08d}", 1)
    assert view.summary.reward == trained.reward
    assert set(view.summary.components) == {"quality", "style_cute", "style_classical", "style_chuunibyou"}
    assert view.segments[1].text == TOKENIZER.decode(trained.trajectory.segments[0].token_ids)
    assert [segment.kind for segment in view.segments] == ["prompt", "action"]


def test_a_window_is_that_part_of_the_tokens(folder: Path) -> None:
    made = Trajectory(archived(folder, UPDATES).trajectory)

    def ids(view: TrajectoryView | None) -> list[int]:
        assert view is not None
        return [token.token_id for segment in view.segments for token in segment.tokens]

    for first in range(len(made.token_ids) + 2):
        assert ids(reader(folder).trained(made.id, range(first, first + 4))) == made.token_ids[first : first + 4]


def test_what_the_archive_has_lost_is_said_and_the_row_still_shown(folder: Path, history: RunHistory) -> None:
    oldest = reader(folder).page(None, 1000, history).trajectories[-1]
    view = reader(folder).trained(oldest.id)
    assert view is not None

    assert view.summary == oldest
    assert (view.segments, view.token_count) == ([], oldest.tokens)
    assert "no longer has update 1" in view.note


def test_one_of_several_steps_at_the_same_update_is_found(tmp_path: Path) -> None:
    fill_folder(tmp_path, 3)
    archive = Archive(tmp_path / "archive")
    step = archive.read(3)
    (tmp_path / "archive" / archive.steps()[-1].file_name).unlink()
    for number in range(4):
        archive.append(
            pb.ArchivedUpdate(
                update=3, trainer_epoch=1, trajectories=[step.trajectories[number]], version_before=str(number)
            )
        )

    views = [reader(tmp_path).trained(one.trajectory.id) for one in step.trajectories]
    assert [view.version_before for view in views if view] == ["0", "1", "2", "3"]


def test_numbers_that_are_no_numbers_are_absent(tmp_path: Path) -> None:
    fill_folder(tmp_path, 1)
    archive = Archive(tmp_path / "archive")
    step = archive.read(1)
    step.trajectories[0].advantages[1] = float("nan")
    del step.trajectories[0].values[:]
    (tmp_path / "archive" / archive.steps()[0].file_name).write_bytes(step.SerializeToString())

    view = reader(tmp_path).trained(step.trajectories[0].trajectory.id)
    assert view is not None
    tokens = view.segments[1].tokens
    assert [token.advantage is None for token in tokens] == [False, True] + [False] * (len(tokens) - 2)
    assert all(token.value is None for token in tokens)
    assert view.largest_advantage is not None


def test_turns_alternate_and_count(tmp_path: Path) -> None:
    made = recorded([1, 5], [([6], [7]), ([8], [])], {"a": 1}, task="writing")
    summary = summary_of_entry(made.id, {"ordinal": "3"}, "waiting")
    view = TrajectoryReader(tmp_path, None, max_lag=4).untrained(made.message.SerializeToString(), summary, note="here")

    kinds = [(segment.kind, segment.turn, segment.text) for segment in view.segments]
    assert kinds == [("prompt", 0, "#1 #5"), ("action", 1, "#6"), ("observation", 1, "#7"), ("action", 2, "#8")]
    assert (view.summary.tokens, view.summary.turns, view.summary.finish_reason) == (5, 2, "stop")
    assert view.note == "here; no tokenizer was found: token ids stand for the text"


def test_an_entry_tells_its_outcome_once_it_is_scored() -> None:
    text = '{"kind":"scored","components":{"a":0.5},"value":0.25,"scored_under":7,"scoring_started_s":1.0}'
    scored = summary_of_entry("t", {"ordinal": "3", "outcome": text}, "scored")
    assert (scored.ordinal, scored.reward, scored.scored_under, scored.components) == (3, 0.25, 7, {"a": 0.5})
    failed = summary_of_entry("t", {"outcome": '{"kind":"invalid","reason":"no"}'}, "dead")
    assert (failed.ordinal, failed.reward, failed.components) == (None, None, {})


def test_a_place_is_the_end_of_a_line(folder: Path, history: RunHistory) -> None:
    size = (folder / "updates.jsonl").stat().st_size
    whole = reader(folder).page(None, 1000, history)
    assert reader(folder).page(place_at(size), 1000, history) == whole
