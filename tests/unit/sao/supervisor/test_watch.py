"""When a run is over, and when a start that looks alive has failed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from sao.board.base import EngineFacts, EngineState, TrainerFacts, TrainerState
from sao.config import load_run_config
from sao.preference import Preference
from sao.store_memory import StoreUse
from sao.supervisor import watch
from sao.supervisor.board_view import BoardView
from sao.supervisor.folder import RunFolder
from sao.supervisor.supervisor import Outcome, Supervisor
from sao.supervisor.tracked import GaveUpError
from sao.supervisor.views import PlainLines
from sao.supervisor.watch import StoppedError, Watch
from tests.support.update_rows import rows_of
from tests.unit.sao.test_store_memory import use_of


@dataclass
class StandInBoard:
    """Engines as a test sets them; each look takes the next set, the last one stays."""

    looks: list[dict[str, EngineFacts]]
    seen: int = 0
    facts: TrainerFacts | None = None
    use: StoreUse | None = field(default_factory=lambda: use_of(share=0.1))

    def trainer(self) -> TrainerFacts | None:
        return self.facts

    def engines(self) -> dict[str, EngineFacts]:
        self.seen += 1
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def preference(self) -> Preference | None:
        return None

    def store_use(self) -> StoreUse | None:
        return self.use


class Finished(Supervisor):
    """No processes; the trainer has ended."""

    def tick(self) -> Outcome:
        super().tick()
        return Outcome.FINISHED


@dataclass
class Clock:
    """Time that passes only when somebody sleeps."""

    now: float = 100.0
    naps: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    result = Clock()
    monkeypatch.setattr(watch, "time", result)
    return result


@pytest.fixture
def supervisors(tmp_path: Path) -> Iterator[dict[str, Supervisor]]:
    folder = RunFolder(tmp_path)
    made: dict[str, Supervisor] = {
        "running": Supervisor([], folder, lambda *_: None, warm_start=None, start_timeout_s=1.0),
        "finished": Finished([], folder, lambda *_: None, warm_start=None, start_timeout_s=1.0),
    }
    yield made
    for one in made.values():
        one.stop()


def engine(state: EngineState, version: str, *, verified: list[str], error: str = "") -> dict[str, EngineFacts]:
    facts = EngineFacts(
        engine_id="engine-0", url="http://e", state=state, version=version, verified=verified, error=error, since_s=0.0
    )
    return {"engine-0": facts}


def watching(supervisor: Supervisor, tmp_path: Path, looks: list[dict[str, EngineFacts]]) -> tuple[Watch, StandInBoard]:
    board = StandInBoard(looks)
    config = load_run_config(None, [], env={})
    return Watch(supervisor, config, RunFolder(tmp_path), cast("BoardView", board), PlainLines()), board


def test_a_signal_stops_the_watch(supervisors: dict[str, Supervisor], tmp_path: Path, clock: Clock) -> None:
    watched, _ = watching(supervisors["running"], tmp_path, [{}])

    with pytest.raises(StoppedError, match="SIGINT"):
        watched.until_finished([signal.SIGINT])


def test_a_full_store_is_shown_while_the_run_goes_on(
    supervisors: dict[str, Supervisor], tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    watched, board = watching(supervisors["running"], tmp_path, [{}])
    board.use = use_of(scored=4, share=1.0)

    with pytest.raises(StoppedError):
        watched.until_finished([signal.SIGINT])

    assert "STORE FULL" in capsys.readouterr().out


def test_the_run_is_over_when_every_engine_serves_the_newest_version(
    supervisors: dict[str, Supervisor], tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder(tmp_path).rows_file.write_text("".join(row.model_dump_json() + "\n" for row in rows_of([1.0] * 8)))
    behind = engine(EngineState.LOADING, "v00000002", verified=["v00000001"])
    there = engine(EngineState.SERVING, "v00000002", verified=["v00000001", "v00000002"])
    watched, board = watching(supervisors["finished"], tmp_path, [behind, behind, behind, there])

    watched.until_finished([])

    assert board.seen >= 4
    assert "every engine serves v00000002" in capsys.readouterr().out


def test_a_version_that_no_update_made_is_waited_for_too(
    supervisors: dict[str, Supervisor], tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a guard had held at the end of a run is published when the run is started again."""
    RunFolder(tmp_path).rows_file.write_text("".join(row.model_dump_json() + "\n" for row in rows_of([1.0] * 8)))
    there = engine(EngineState.SERVING, "v00000003", verified=["v00000003"])
    watched, board = watching(supervisors["finished"], tmp_path, [there])
    board.facts = TrainerFacts(epoch=2, update=4, version="v00000003", consumed=8, state=TrainerState.FINISHED)

    watched.until_finished([])

    assert "every engine serves v00000003" in capsys.readouterr().out


def test_the_end_does_not_wait_for_ever_for_an_engine(
    supervisors: dict[str, Supervisor], tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder(tmp_path).rows_file.write_text("".join(row.model_dump_json() + "\n" for row in rows_of([1.0] * 8)))
    stuck = engine(EngineState.QUARANTINED, "v00000001", verified=["v00000001"], error="gone")
    watched, _ = watching(supervisors["finished"], tmp_path, [stuck])

    watched.until_finished([])

    assert watch.CONVERGE_S <= sum(clock.naps) < watch.CONVERGE_S + 5
    assert "not on v00000002 in time: engine-0" in capsys.readouterr().out


def test_a_start_fails_when_no_engine_passes_the_first_canary(
    supervisors: dict[str, Supervisor], tmp_path: Path, clock: Clock
) -> None:
    refusing = engine(EngineState.QUARANTINED, "v00000001", verified=[], error="log-probs differ by 0.8")
    watched, _ = watching(supervisors["running"], tmp_path, [refusing])

    with pytest.raises(GaveUpError, match="no engine has passed the canary") as caught:
        watched.until_finished([])

    assert caught.value.name == "weights"
    assert "log-probs differ by 0.8" in caught.value.tail[0]
    assert sum(clock.naps) >= watch.FIRST_VERSION_S


def test_a_start_does_not_fail_over_an_engine_that_passes_in_time(
    supervisors: dict[str, Supervisor], tmp_path: Path, clock: Clock
) -> None:
    refusing = engine(EngineState.QUARANTINED, "v00000001", verified=[], error="not there yet")
    serving = engine(EngineState.SERVING, "v00000001", verified=["v00000001"])
    pending: list[signal.Signals] = []

    class Patient(StandInBoard):
        def engines(self) -> dict[str, EngineFacts]:
            if clock.now > 100.0 + 3 * watch.FIRST_VERSION_S:
                pending.append(signal.SIGTERM)
            return super().engines()

    board = Patient([refusing] * 10 + [serving])
    config = load_run_config(None, [], env={})
    watched = Watch(supervisors["running"], config, RunFolder(tmp_path), cast("BoardView", board), PlainLines())

    with pytest.raises(StoppedError):
        watched.until_finished(pending)
