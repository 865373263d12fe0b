from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from sao.telemetry import logs


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_an_event_is_one_json_line_with_service_run_and_context(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("reward", "run-7")
    logs.get_logger("here").info("trajectory scored", trajectory="t1", value=0.5)
    (line,) = lines(capsys)
    time = line.pop("time")
    assert isinstance(time, str)
    assert time.endswith("Z")
    assert line == {
        "event": "trajectory scored",
        "level": "info",
        "logger": "here",
        "run": "run-7",
        "service": "reward",
        "trajectory": "t1",
        "value": 0.5,
    }


def test_a_logger_made_before_configure_uses_it(capsys: pytest.CaptureFixture[str]) -> None:
    early = logs.get_logger("early")
    logs.configure("trainer", "r")
    early.warning("late")
    assert lines(capsys)[0]["service"] == "trainer"


def test_the_standard_library_comes_out_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("trainer", "r")
    logging.getLogger("lib").warning("slow: %d ms", 30, extra={"peer": "x"})
    (line,) = lines(capsys)
    assert (line["event"], line["level"], line["logger"], line["peer"], line["run"]) == (
        "slow: 30 ms",
        "warning",
        "lib",
        "x",
        "r",
    )


def test_tracebacks_stay_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("trainer", "r")
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        logs.get_logger("x").exception("step failed", update=3)
    (line,) = lines(capsys)
    assert "ZeroDivisionError" in str(line["exception"])
    assert line["update"] == 3


def test_bound_context_and_unserialisable_values_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("trainer", "r")
    logs.get_logger("x").bind(version="v00000001").info("published", path=object)
    (line,) = lines(capsys)
    assert line["version"] == "v00000001"
    assert line["path"] == "<class 'object'>"


def test_request_logs_of_libraries_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("trainer", "r")
    logging.getLogger("httpx").info("HTTP Request: GET /healthz")
    logging.getLogger("httpx").warning("retrying")
    assert [line["event"] for line in lines(capsys)] == ["retrying"]


def test_configuring_twice_does_not_double_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("a", "r")
    logs.configure("b", "r")
    logs.get_logger("x").info("once")
    assert [line["service"] for line in lines(capsys)] == ["b"]
