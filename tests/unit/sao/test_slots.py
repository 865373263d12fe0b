"""Slots against a plain set."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sao.slots import Slots


@given(st.lists(st.integers(0, 40)))
def test_it_is_a_set_whose_ranges_are_as_few_as_can_be(numbers: list[int]) -> None:
    slots, expected = Slots(), set[int]()
    for number in numbers:
        slots.add(number)
        expected.add(number)
        ranges = slots.ranges
        assert {n for start, end in ranges for n in range(start, end)} == expected
        assert all(end < start for (_, end), (start, _) in pairwise(ranges))
        assert {n for n in range(42) if n in slots} == expected
        assert slots.frontier == min(set(range(42)) - expected)
        assert list(slots.beyond()) == sorted(n for n in expected if n > slots.frontier)
    assert Slots(slots.ranges).ranges == slots.ranges


def test_a_hole_costs_one_pair_however_far_it_goes_on() -> None:
    slots = Slots()
    for number in (n for n in range(10_000) if n not in {7, 5000}):
        slots.add(number)
    assert slots.ranges == [(0, 7), (8, 5000), (5001, 10_000)]
