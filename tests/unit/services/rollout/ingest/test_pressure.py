"""Ingest says once what changed about the store's memory, and shows it as long as it lasts."""

from __future__ import annotations

import pytest
import structlog
from prometheus_client import REGISTRY

from sao.config.schema import RedisSection
from sao.store_memory import Pressure
from services.rollout.ingest.pressure import CALM_S, PressureWatch
from tests.unit.sao.test_store_memory import use_of

READ_EVERY_S = 1.0


class Readings:
    """A watch that reads the store once a second."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.watch = PressureWatch(RedisSection(), clock=lambda: self.now)

    def see(self, *shares: float) -> list[str]:
        """What was logged while the store was used this much."""
        with structlog.testing.capture_logs() as logs:
            for share in shares:
                self.now += READ_EVERY_S
                self.watch.see(use_of(scored=4, share=share))
        return [str(line["event"]).partition(":")[0] for line in logs]


@pytest.fixture
def readings() -> Readings:
    return Readings()


def shown() -> tuple[str, float]:
    """The state and the time that the metrics tell."""
    (state,) = [
        one.label for one in Pressure if REGISTRY.get_sample_value("sao_ingest_store_pressure", {"state": one.label})
    ]
    since = REGISTRY.get_sample_value("sao_ingest_store_pressure_since_seconds")
    assert since is not None
    return state, since


def test_each_change_is_logged_once_and_shown_while_it_lasts(readings: Readings) -> None:
    calm = [0.5] * round(CALM_S / READ_EVERY_S)
    assert readings.see(0.1, 0.79) == []
    assert shown() == ("room", 0.0)
    assert readings.see(0.8, 0.9, 0.85) == ["store at its mark"]
    assert shown() == ("mark", 1003.0)
    assert readings.see(1.0, 1.1) == ["store full"]
    assert shown() == ("full", 1003.0)
    assert readings.see(*calm) == ["store has room again"]
    assert shown() == ("room", 0.0)
    assert readings.see(0.8) == ["store at its mark"]
    assert shown() == ("mark", readings.now)


def test_a_store_that_goes_up_and_down_around_its_mark_is_told_once(readings: Readings) -> None:
    assert readings.see(*[0.81, 0.79] * 20) == ["store at its mark"]
    assert shown() == ("mark", 1001.0)


def test_the_line_says_what_fills_the_store_and_what_to_do(readings: Readings) -> None:
    with structlog.testing.capture_logs() as logs:
        readings.watch.see(use_of(waiting=1, scored=4, share=0.85))
    (line,) = logs
    assert (line["used"], line["mark"], line["log_level"]) == ("85%", "80%", "warning")
    assert "4 scored ones" in line["holds"]
    assert "the trainer does not keep up" in line["do"]
