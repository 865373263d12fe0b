"""A dry run is arithmetic over what was trained on, whoever writes or prunes the archive meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.archive import Archive
from sao.board.memory import MemoryBoard
from sao.outcome import Scored
from sao.preference import PreferenceDocument
from sao.v1 import archive_pb2 as pb
from sao.v1 import trajectory_pb2
from services.reward.preferences.archived import newest_archived
from services.reward.preferences.dry_run import BINS, Archived, dry_run
from tests.unit.services.reward.preferences.test_routes import CLASSICAL, CUTE, TASK, URL, client_of, problem

A = PreferenceDocument(name="a", weights={"a": 1.0})
B = PreferenceDocument(name="b", weights={"b": 1.0})


def pool(*pairs: tuple[float, float]) -> list[Archived]:
    return [Archived(f"t{number}", number, {"a": a, "b": b}) for number, (a, b) in enumerate(pairs)]


def test_what_flips_and_what_moves_most_is_named() -> None:
    found = dry_run(pool((0.0, 1.0), (1.0, 0.0), (0.2, 0.3), (0.9, 0.8)), A, B, version=3, asked=10)
    assert (found.asked, found.trajectories, found.compared, found.version) == (10, 4, 4, 3)
    assert (found.flips.up, found.flips.down) == (1, 1)
    assert [(one.id, one.now, one.then, one.flips) for one in found.examples] == [
        ("t0", 0.0, 1.0, True),
        ("t1", 1.0, 0.0, True),
        ("t2", 0.2, 0.3, False),
        ("t3", 0.9, 0.8, False),
    ]
    assert found.now.mean == pytest.approx(0.525)
    assert found.now.deciles[0] == 0.0
    assert found.now.deciles[-1] == 1.0
    assert found.now.histogram == [1, 0, 1, 0, 0, 0, 0, 0, 0, 2]


def test_what_lacks_a_component_is_counted_and_not_compared() -> None:
    archived = [*pool((0.0, 1.0), (1.0, 0.0)), Archived("old", 9, {"a": 1.0}), Archived("odd", 9, {"b": 1.0})]
    found = dry_run(archived, A, B, version=1, asked=4)
    assert (found.trajectories, found.compared) == (4, 2)
    assert found.missing == {"b": 1}
    assert found.missing_now == 1


def test_rewards_that_are_all_the_same_are_seen_to_teach_nothing() -> None:
    found = dry_run(pool((0.0, 0.5), (1.0, 0.5)), A, B, version=1, asked=2)
    assert found.then.std == 0
    assert (found.flips.up, found.flips.down) == (0, 0)


def test_an_overflow_is_counted_not_shown() -> None:
    huge = PreferenceDocument(name="h", weights={"a": 1000.0}, gates=["a"])
    found = dry_run(pool((1e308, 1.0), (1.0, 0.0)), B, huge, version=1, asked=2)
    assert (found.compared, found.not_finite) == (1, 1)
    assert found.then.deciles == [1.0] * 11


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=30))
def test_both_histograms_hold_every_trajectory_and_the_same_preference_moves_nothing(
    pairs: list[tuple[float, float]],
) -> None:
    found = dry_run(pool(*pairs), A, B, version=1, asked=30)
    for side in (found.now, found.then):
        assert sum(side.histogram) == len(pairs) == found.compared
        assert side.deciles == sorted(side.deciles)
        assert len(side.histogram) == (BINS if pairs else 0)
    assert found.flips.up + found.flips.down <= len(pairs)
    back = dry_run(pool(*pairs), B, A, version=1, asked=30)
    assert (back.now, back.then) == (found.then, found.now)
    assert (back.flips.up, back.flips.down) == (found.flips.down, found.flips.up)
    still = dry_run(pool(*pairs), A, A, version=1, asked=30)
    assert (still.flips.up, still.flips.down, still.examples) == (0, 0, [])


def archive(directory: Path, *updates: Sequence[tuple[str, dict[str, float]]], epoch: int = 1) -> Archive:
    """An archive that holds one update of each of these trajectories."""
    made = Archive(directory)
    for number, trajectories in enumerate(updates, start=1):
        made.append(
            pb.ArchivedUpdate(
                update=number,
                trainer_epoch=epoch,
                trajectories=[
                    pb.TrainedTrajectory(
                        trajectory=trajectory_pb2.Trajectory(id=name),
                        outcome_json=Scored(
                            components=components, value=0.0, scored_under=1, scoring_started_s=1.0
                        ).model_dump_json(),
                    )
                    for name, components in trajectories
                ],
            )
        )
    return made


def test_the_newest_come_first_and_each_once(tmp_path: Path) -> None:
    first, second = [("a", {"x": 1.0}), ("b", {"x": 2.0})], [("c", {"x": 3.0})]
    archive(tmp_path, first, second)
    archive(tmp_path, [("a", {"x": 9.0})], epoch=2)  # made again after a fall-back
    found, unreadable = newest_archived(tmp_path, 10)
    assert [(one.id, one.update, one.components["x"]) for one in found] == [("c", 2, 3.0), ("a", 1, 9.0), ("b", 1, 2.0)]
    assert unreadable == 0
    assert [one.id for one in newest_archived(tmp_path, 2)[0]] == ["c", "a"]
    assert newest_archived(tmp_path / "none", 5) == ([], 0)


def test_what_is_pruned_or_damaged_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = archive(tmp_path, *([(f"t{number}", {"x": 1.0})] for number in range(4)))
    names = made.steps()
    (tmp_path / names[2].file_name).write_bytes(b"\xff\xff")
    real = Archive.load

    def load(self: Archive, step: object) -> pb.ArchivedUpdate:
        if step == names[1]:
            made.prune(below=3)
        return real(self, step)  # type: ignore[arg-type]

    monkeypatch.setattr(Archive, "load", load)
    found, unreadable = newest_archived(tmp_path, 10)
    assert [one.id for one in found] == ["t3"]
    assert unreadable == 1


async def test_a_proposal_is_tried_without_being_stored(tmp_path: Path) -> None:
    board = MemoryBoard()
    await board.put_preference(CUTE)
    cute = dict.fromkeys(TASK.components, 0.0) | {"quality": 1.0, "style_cute": 1.0}
    classical = dict.fromkeys(TASK.components, 0.0) | {"quality": 1.0, "style_classical": 1.0}
    async with client_of(board, tmp_path) as client:
        empty = (await client.post(f"{URL}:dry-run", content=CLASSICAL.model_dump_json())).json()
        assert (empty["trajectories"], empty["now"]["mean"], empty["examples"]) == (0, None, [])
        archive(tmp_path / "archive", [("t1", cute), ("t2", classical)], [("t3", cute)])
        answer = await client.post(f"{URL}:dry-run", content=CLASSICAL.model_dump_json(), params={"last": 3})
        body = answer.json()
        assert (body["compared"], body["flips"]) == (3, {"up": 1, "down": 2})
        assert body["now"]["mean"] == pytest.approx(2 / 3)
        assert body["then"]["mean"] == pytest.approx(1 / 3)
        unknown = {"name": "p", "weights": {"wit": 1.0}}
        assert problem(await client.post(f"{URL}:dry-run", json=unknown), 422)["unknown_components"] == ["wit"]
        for last in (0, 1001):
            too_many = await client.post(f"{URL}:dry-run", content=CLASSICAL.model_dump_json(), params={"last": last})
            assert "last" in problem(too_many, 422)["detail"]
        assert (await client.get(URL)).headers["etag"] == '"1"'


def test_what_was_judged_under_another_rubric_is_missing_not_reused() -> None:
    kind, strict = (PreferenceDocument(name=name, weights={"a": 1.0}, rubric=name) for name in ("kind", "strict"))
    archived = [Archived(f"t{i}", i, {"a": i / 4}, {"a": kind.rubric_id}) for i in range(4)]

    found = dry_run(archived, kind, strict, version=1, asked=4)

    assert found.missing == {"a": 4}
    assert found.compared == 0
    assert dry_run(archived, kind, kind, version=1, asked=4).compared == 4
