"""Which lines people get about weight versions that wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from sao.cli.status import print_status
from sao.config import RunConfig, load_run_config
from sao.supervisor.held import held_notices
from sao.weights.control import Control, ControlFile, Held, Pin

PIN = Pin(version="v00000002", by="activate", reason="worse", client="127.0.0.1", since_s=1_800_000_000.0)
HELD = Held(by="canary_drift", reason="3.1 nats", since_s=1_800_000_000.0)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    found = load_run_config(None, [f'run.dir="{tmp_path / "my run"}"'], env={})
    found.versions_dir.mkdir(parents=True)
    return found


def told(config: RunConfig, control: Control) -> list[str]:
    ControlFile(config.versions_dir / "control.json").write(control)
    return held_notices(config, config.run.dir)


def test_while_publishing_goes_on_there_is_no_line(config: RunConfig) -> None:
    assert held_notices(config, config.run.dir) == []
    assert told(config, Control(held={"v00000003": HELD}, accepted="v00000004")) == []


def test_a_roll_back_is_told_with_reason_time_and_the_way_on(config: RunConfig) -> None:
    (line,) = told(config, Control(pin=PIN, held={"v00000003": HELD}))
    assert line == (
        "PUBLISHING HELD, engines stay on v00000002, by activate since 2027-01-15 08:00:00 UTC: worse; "
        f"`sao weights resume '{config.run.dir}'` lets it go on (docs/weights.md)"
    )


def test_a_version_that_a_guard_holds_is_told(config: RunConfig) -> None:
    (line,) = told(config, Control(held={"v00000003": HELD}, accepted="v00000002"))
    assert line.startswith(
        "VERSION v00000003 HELD by canary_drift since 2027-01-15 08:00:00 UTC, engines stay on v0000"
    )
    assert ": 3.1 nats; `sao weights resume " in line


def test_a_file_that_cannot_be_read_is_told(config: RunConfig) -> None:
    (config.versions_dir / "control.json").write_text("{")
    (line,) = held_notices(config, config.run.dir)
    assert line.startswith("WEIGHTS SERVICE CANNOT START")


def test_status_tells_it_of_a_run_that_is_not_up_too(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    (config.run.dir / "run.toml").write_text(f'[run]\ndir = "{config.run.dir}"\n')
    told(config, Control(pin=PIN))
    print_status(config.run.dir)
    assert "PUBLISHING HELD, engines stay on v00000002" in capsys.readouterr().out
