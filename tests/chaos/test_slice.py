"""Ten rounds of chaos on a run with every real process: what `make chaos` does a hundred times, for CI.

An eleventh takes the store's file away: what was in it is lost, and every one of it is named and rolled out again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.harness import Harness
from tests.support.engine import ENGINE_PYTHON

ROUNDS = (
    "kill trainer",
    "unreachable valkey",
    "kill ingest",
    "kill worker",
    "damaged payload",
    "kill valkey",
    "kill weights",
    "damaged checkpoint",
    "kill reward",
    "kill engine",
    "emptied valkey",
)
"""Every kind of process once, and each kind of damage; the rest of the table is for `make chaos`."""


@pytest.mark.chaos
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_nothing_is_lost_and_nothing_trains_twice(tmp_path: Path) -> None:
    if not ENGINE_PYTHON.exists():
        pytest.skip("the engine environment is missing: run `make setup`")
    said: list[str] = []

    # Other tests share the machine: how fast it recovers is judged by `make chaos`, that it does, here.
    harness = Harness(tmp_path / "run", 0, said.append, pause_s=1.0, deadline_s=150.0)
    outcome = harness.run([FAULTS[name] for name in ROUNDS])

    assert outcome.passed, "\n".join([*said, str(outcome.verdict), str(outcome)])
    assert [made.fault for made in outcome.rounds] == list(ROUNDS)
    assert all(made.recovery_s is not None for made in outcome.rounds), "\n".join(said)
