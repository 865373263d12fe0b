from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.board.base import VersionRecord
from sao.lineage import Lineage, UnknownVersionError


def record(name: str, update: int, parent: str | None, epoch: int = 1) -> VersionRecord:
    return VersionRecord(name=name, update=update, parent=parent, epoch=epoch)


def lineage(*records: VersionRecord) -> Lineage:
    return Lineage({item.name: item for item in records})


STRAIGHT = lineage(record("v0", 0, None), record("v1", 1, "v0"), record("v2", 2, "v1"))


def test_on_one_branch_lag_is_the_difference_of_updates() -> None:
    assert STRAIGHT.lag("v0", "v2", 2) == 2
    assert STRAIGHT.lag("v2", "v2", 2) == 0


def test_updates_made_since_the_last_publication_count() -> None:
    assert STRAIGHT.lag("v1", "v2", 5) == 4


def test_work_of_an_abandoned_branch_is_not_fresh() -> None:
    """After a crash at update 5 the trainer restarts from 2; the old v5 is 3 updates down another branch."""
    crashed = lineage(
        record("v2", 2, None),
        record("v5", 5, "v2"),
        record("v6", 2, "v2", epoch=2),
        record("v7", 5, "v6", epoch=2),
    )
    assert crashed.lag("v5", "v6", 2) == 3
    assert crashed.lag("v5", "v7", 5) == 6


def test_a_rollback_is_as_near_to_its_original_as_their_weights_are() -> None:
    rolled = lineage(record("v1", 1, None), record("v9", 9, "v1"), record("v10", 1, "v1", epoch=2))
    assert rolled.lag("v1", "v10", 1) == 0
    assert rolled.lag("v9", "v10", 1) == 8


def test_a_version_newer_than_what_the_trainer_restored_lags_by_the_way_back() -> None:
    assert STRAIGHT.lag("v2", "v1", 1) == 1


@pytest.mark.parametrize(("version", "current"), [("v9", "v2"), ("v1", "v9")])
def test_an_unknown_version_is_a_key_error_that_names_it(version: str, current: str) -> None:
    with pytest.raises(KeyError, match="v9"):
        STRAIGHT.lag(version, current, 2)


def test_versions_of_different_roots_have_no_lag() -> None:
    two = lineage(record("a", 1, None), record("b", 1, None))
    with pytest.raises(UnknownVersionError, match="no common ancestor"):
        two.lag("a", "b", 1)


def test_a_circle_of_parents_is_reported_not_followed() -> None:
    circle = lineage(record("a", 1, "b"), record("b", 1, "a"), record("c", 1, None))
    with pytest.raises(UnknownVersionError, match="its own ancestor"):
        circle.lag("a", "c", 1)


def test_a_trainer_behind_its_own_version_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="before 2"):
        STRAIGHT.lag("v1", "v2", 1)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, VersionRecord]:
    """A tree of versions in which updates never fall from parent to child."""
    updates = [0]
    parents: list[int | None] = [None]
    for index in range(1, draw(st.integers(1, 30))):
        parent = draw(st.integers(0, index - 1))
        parents.append(parent)
        updates.append(updates[parent] + draw(st.integers(0, 3)))
    return {
        f"v{i}": record(f"v{i}", updates[i], None if parents[i] is None else f"v{parents[i]}")
        for i in range(len(parents))
    }


def chain(tree: dict[str, VersionRecord], name: str) -> list[str]:
    names: list[str] = []
    step: str | None = name
    while step is not None:
        names.append(step)
        step = tree[step].parent
    return names


@given(trees(), st.data())
def test_lag_is_the_way_through_the_nearest_common_ancestor(
    tree: dict[str, VersionRecord], data: st.DataObject
) -> None:
    one, other = (data.draw(st.sampled_from(sorted(tree))) for _ in range(2))
    above = set(chain(tree, other))
    ancestor = next(name for name in chain(tree, one) if name in above)
    way = tree[one].update + tree[other].update - 2 * tree[ancestor].update
    found = Lineage(tree)
    assert found.common_ancestor(one, other) == ancestor == found.common_ancestor(other, one)
    assert found.lag(one, other, tree[other].update + 2) == way + 2
    assert found.lag(one, other, tree[other].update) == found.lag(other, one, tree[one].update) >= 0
