"""The keeper of the processes: it restarts whatever ends, for ever, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sao.supervisor.plan import Service
from sao.supervisor.process import Command
from tests.chaos.fleet import Fleet

STAYS = "import pathlib, signal, sys; pathlib.Path(sys.argv[1]).touch(); signal.pause()"
ENDS = "pass"
DEADLINE_S = 20.0

NewFleet = Callable[..., Fleet]


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def new_fleet(tmp_path: Path, ended: list[str]) -> Iterator[NewFleet]:
    made: list[Fleet] = []

    def make(**programs: str) -> Fleet:
        services = [
            Service(
                name=name,
                command=lambda _start, name=name, program=program: Command(  # type: ignore[misc]
                    name, (sys.executable, "-c", program, str(tmp_path / f"{name}.ready")), tmp_path / "unused.log"
                ),
                ready=(tmp_path / f"{name}.ready").exists,
                after=frozenset({"first"} if name == "second" else ()),
                address="nowhere",
                health=None,
            )
            for name, program in programs.items()
        ]
        made.append(Fleet(services, tmp_path, 0, lambda name, how: ended.append(f"{name}: {how}")))
        return made[-1]

    yield make
    for fleet in made:
        assert fleet.stop() == []


def test_one_waits_for_the_other_and_both_become_ready(new_fleet: NewFleet) -> None:
    fleet = new_fleet(first=STAYS, second=STAYS)
    fleet.tick()
    assert fleet.pid("second") is None

    assert fleet.wait(lambda: not fleet.unready(), DEADLINE_S)


def test_what_is_killed_is_started_again_and_told(new_fleet: NewFleet, ended: list[str], tmp_path: Path) -> None:
    fleet = new_fleet(first=STAYS)
    assert fleet.wait(lambda: not fleet.unready(), DEADLINE_S)
    before = fleet.pid("first")

    assert fleet.signal("first", signal.SIGKILL)
    assert fleet.wait(lambda: fleet.pid("first") not in {None, before}, DEADLINE_S)
    assert ended == ["first: killed by SIGKILL"]
    assert sorted(path.name for path in tmp_path.glob("first.*.log")) == ["first.000-000.log", "first.000-001.log"]


def test_however_often_it_ends_it_is_started_again(new_fleet: NewFleet, ended: list[str]) -> None:
    fleet = new_fleet(first=ENDS)

    assert fleet.wait(lambda: len(ended) >= 5, DEADLINE_S)
    assert set(ended) == {"first: exit code 0"}


def test_a_retired_process_ends_in_good_order_and_stays_away(new_fleet: NewFleet, ended: list[str]) -> None:
    fleet = new_fleet(first=STAYS)
    assert fleet.wait(lambda: not fleet.unready(), DEADLINE_S)

    assert fleet.retire("first")
    assert ended == ["first: killed by SIGTERM"]
    assert fleet.unready() == []
    fleet.tick()
    assert fleet.pid("first") is None
    assert not fleet.signal("first", signal.SIGKILL)


def test_the_end_takes_a_stopped_process_too(new_fleet: NewFleet) -> None:
    fleet = new_fleet(first=STAYS)
    assert fleet.wait(lambda: not fleet.unready(), DEADLINE_S)
    pid = fleet.pid("first")
    assert pid is not None
    assert fleet.signal("first", signal.SIGSTOP, all_of_it=True)

    assert fleet.stop() == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
