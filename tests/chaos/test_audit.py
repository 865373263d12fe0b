"""The audit on ledgers written by hand: each thing that can go wrong is found, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.audit import Evidence, audit, falls

SOUND = Evidence(
    acknowledged={"a", "b", "c", "d", "n"},
    superseded={"s"},
    trained=["a", "unanswered"],
    dead={"b": "payload_damaged: not a sao.v1.Trajectory"},
    dropped={"c": "stale", "a": "stale"},
    waiting={"d"},
    named={"n"},
    not_leased_again=set(),
    preferences=(2, 2),
    counted={"stale": 1, "payload_damaged": 1},
    consumed=2,
)
"""One of each fate. `a` was dropped by a trainer that died before it could settle that, and trained later;
`unanswered` became durable in an ingest that died before it could say so."""


def test_every_acknowledged_trajectory_gets_one_fate() -> None:
    verdict = audit(SOUND)

    assert verdict.passed
    assert verdict.acknowledged == 5
    assert verdict.fates == {"trained": 1, "dead": 1, "dropped": 1, "waiting": 1, "named": 1}
    assert verdict.dropped_by_reason == {"stale": 1}
    assert verdict.dead_by_reason == {"payload_damaged": 1}
    assert verdict.uncounted == {}


@pytest.mark.parametrize(
    ("field", "changed", "finding", "ids"),
    [
        ("trained", ["unanswered", "x"], "lost", []),  # `a` counts as dropped then
        ("acknowledged", {"a", "e"}, "lost", ["e"]),
        ("waiting", set(), "lost", ["d"]),
        ("named", set(), "lost", ["n"]),
        ("not_leased_again", {"n"}, "not_leased_again", ["n"]),
        ("dead", {"b": ""}, "lost", ["b"]),
        ("dropped", {"c": ""}, "lost", ["c"]),
        ("trained", ["a", "a"], "twice", ["a"]),
        ("trained", ["unanswered", "unanswered"], "twice", ["unanswered"]),
        ("trained", ["a", "s"], "trained_though_superseded", ["s"]),
        ("trained", ["a", "b"], "dead_though_trained", ["b"]),
    ],
)
def test_what_is_wrong_is_named(field: str, changed: Any, finding: str, ids: list[str]) -> None:
    verdict = audit(replace(SOUND, **{field: changed}))

    assert getattr(verdict, finding) == ids
    assert verdict.passed == (not ids)


def test_a_checkpoint_that_claims_more_than_its_steps_trained_is_found() -> None:
    verdict = audit(replace(SOUND, consumed=3))

    assert verdict.miscounted == -1
    assert not verdict.passed


def test_a_preference_that_did_not_come_back_is_found() -> None:
    verdict = audit(replace(SOUND, preferences=(1, 3)))

    assert verdict.preferences_lost == 2
    assert not verdict.passed


def test_a_drop_that_the_trainer_forgot_to_count_is_shown() -> None:
    verdict = audit(replace(SOUND, counted={"payload_damaged": 1}))

    assert verdict.uncounted == {"stale": 1}


def test_a_run_that_acknowledged_nothing_proves_nothing() -> None:
    assert not audit(replace(SOUND, acknowledged=set())).passed


def test_versions_that_go_back_are_named() -> None:
    assert falls(["v1", "v2", "v2", "v4"]) == []
    assert falls(["v1", "v3", "v2", "v4"]) == [("v3", "v2")]
