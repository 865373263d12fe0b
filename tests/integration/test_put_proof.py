"""A slice of `make prove-preferences-api`: what must hold however slow the machine is."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.preferences.run import Put, outdated, prove


@pytest.mark.timeout(120)
def test_puts_of_eight_clients_to_two_replicas_that_score_without_a_pause(tmp_path: Path) -> None:
    found = prove(tmp_path, puts=80)
    assert found["correct"], found
    assert found["puts"] == 80
    assert found["scorings_after_a_200"] > 0


def test_a_scoring_under_an_older_version_is_found() -> None:
    stored = [Put(None, 200, version, 0.01, float(version)) for version in (2, 3)]
    assert outdated(stored, [(1.5, 1), (2.5, 2), (3.5, 3), (3.5, 9)]) == (0, 3)
    assert outdated(stored, [(2.5, 1), (3.5, 2)]) == (2, 2)
    # An answer that came late says nothing about the ones before it, and no less than they did.
    overtaken = [Put(None, 200, 3, 0.01, 1.0), Put(None, 200, 2, 0.01, 2.0)]
    assert outdated(overtaken, [(2.5, 2)]) == (1, 1)
