"""The table of faults: what a run of a hundred rounds holds."""

from __future__ import annotations

from collections import Counter

from tests.chaos.faults import FAULTS, deck

PROCESSES = {"engine", "valkey", "ingest", "worker", "reward", "trainer", "weights"}


def test_a_hundred_rounds_hit_every_kind_of_process_at_least_six_times() -> None:
    kinds = Counter(fault.kind for fault in deck(seed=0, rounds=100))

    assert kinds.keys() > PROCESSES
    assert min(kinds[process] for process in PROCESSES) >= 6


def test_a_hundred_rounds_are_the_whole_table() -> None:
    drawn = Counter(fault.name for fault in deck(seed=3, rounds=100))

    assert drawn == {name: fault.times for name, fault in FAULTS.items() if fault.times > 0}
    assert [name for name, fault in FAULTS.items() if fault.times == 0] == ["emptied valkey"]


def test_a_run_goes_on_with_the_faults_it_would_have_had() -> None:
    longer = [fault.name for fault in deck(seed=1, rounds=250)]

    assert [fault.name for fault in deck(seed=1, rounds=130)] == longer[:130]
    assert [fault.name for fault in deck(seed=2, rounds=250)] != longer
