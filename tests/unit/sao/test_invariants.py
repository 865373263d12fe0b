"""Every invariant: a good trajectory violates none, and breaking one names that one and no other."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.invariants import Code, routing_violations, unknown_versions, violations
from sao.routing import NO_RECORD
from tests.support.trajectories import LIMITS, MUTATIONS, ROUTING, VERSIONS, bad, good, routed_experts

seeds = st.integers(0, 2**32)


@given(seed=seeds)
def test_a_good_trajectory_violates_nothing(seed: int) -> None:
    assert violations(good(random.Random(seed)), LIMITS, VERSIONS) == []


@pytest.mark.parametrize("name", MUTATIONS)
@given(seed=seeds)
def test_breaking_one_invariant_names_it_alone(name: str, seed: int) -> None:
    message, code = bad(name, random.Random(seed))
    found = violations(message, LIMITS, VERSIONS)
    assert {violation.code for violation in found} == {code}
    assert all("expected" in violation.text for violation in found)


def test_every_invariant_has_a_mutation() -> None:
    assert {code for code, _ in MUTATIONS.values()} == set(Code) - {Code.ROUTED_EXPERTS}, "that comes beside a message"


@given(seed=seeds, data=st.data())
def test_a_record_of_routed_experts_fits_its_trajectory_or_is_named(seed: int, data: st.DataObject) -> None:
    rng = random.Random(seed)
    message = good(rng)
    limits = replace(LIMITS, routing=ROUTING)
    record = routed_experts(rng, message, ROUTING)
    assert routing_violations(message, record, limits) == []
    assert routing_violations(message, b"", LIMITS) == []
    place = data.draw(st.integers(0, len(record) - 1))
    strange = bytes([data.draw(st.integers(ROUTING.experts, NO_RECORD - 1))])
    broken = [record[:place] + strange + record[place + 1 :], record[:place], record + b"\0", b""]
    cases = [*((one, limits) for one in broken), (b"\0", LIMITS)]
    for found in (routing_violations(message, *case) for case in cases):
        assert [violation.code for violation in found] == [Code.ROUTED_EXPERTS]
        assert "expected" in found[0].text


@given(seed=seeds, names=st.sets(st.sampled_from(["no_task", "no_prompt", "no_attempt", "another_run"]), min_size=2))
def test_every_violation_is_reported_not_only_the_first(seed: int, names: set[str]) -> None:
    rng = random.Random(seed)
    message = good(rng)
    for name in names:
        MUTATIONS[name][1](message, rng, LIMITS)
    assert {v.code for v in violations(message, LIMITS, VERSIONS)} == {MUTATIONS[name][0] for name in names}


def test_error_text_says_what_was_found_and_what_was_expected() -> None:
    message = good(random.Random(0))
    message.segments[0].versions[0].version = "v00000009"
    (violation,) = violations(message, LIMITS, VERSIONS)
    assert str(violation) == (
        "version_unknown: version 'v00000009' is not on the board, expected one announced before it was served"
    )
    assert unknown_versions(message, VERSIONS) == ["v00000009"]


def test_the_order_of_versions_across_turns_is_free() -> None:
    message = good(random.Random(1))
    actions = [segment for segment in message.segments if segment.versions]
    for segment, version in zip(actions, reversed(VERSIONS), strict=False):
        for span in segment.versions:
            span.version = version
    assert violations(message, LIMITS, VERSIONS) == []
