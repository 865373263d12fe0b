"""The frontier: everything below it is done, nothing at it is, and only the gaps above it are remembered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.streams.dispatch import Dispatch, Held, slot_of


@given(slots=st.lists(st.integers(0, 30)))
def test_the_frontier_is_the_first_slot_that_is_not_done(slots: list[int]) -> None:
    dispatch, done = Dispatch(), set[int]()
    for slot in slots:
        if not dispatch.done(slot):
            dispatch.leases[slot] = Held("w", 1, 1, 1)
            dispatch.finish(slot)
        done.add(slot)
        assert dispatch.frontier == next(n for n in range(40) if n not in done)
        assert dispatch.winners == {n for n in done if n > dispatch.frontier}
        assert {n for n in range(40) if dispatch.done(n)} == done
        assert not dispatch.leases


def test_slots_number_the_samples_of_each_ordinal() -> None:
    assert [slot_of(ordinal, sample, 2) for ordinal in (0, 1) for sample in (0, 1)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("ordinal", "sample"), [(-1, 0), (0, -1), (0, 2)])
def test_a_rollout_nobody_wants_has_no_slot(ordinal: int, sample: int) -> None:
    with pytest.raises(ValueError, match=rf"ordinal {ordinal}, sample {sample}.*expected"):
        slot_of(ordinal, sample, 2)
