"""The file that says what is held."""

from __future__ import annotations

from pathlib import Path

import pytest

from sao.weights.control import Control, ControlFile, ControlFileError, Held, Pin

HELD = Held(by="zero_tensor", reason="lm_head.weight holds nothing but zeros", since_s=2.0)
PIN = Pin(version="v00000002", by="activate", reason="worse", client="127.0.0.1", since_s=1.0)


def test_what_was_written_is_read_and_no_file_holds_nothing(tmp_path: Path) -> None:
    file = ControlFile(tmp_path / "control.json")
    assert file.read() == Control()
    written = Control(pin=PIN, held={"v00000003": HELD}, accepted="v00000002")
    file.write(written)
    assert ControlFile(tmp_path / "control.json").read() == written


@pytest.mark.parametrize("text", ["", "{", '{"format": 2}', '{"pin": {"version": "../x"}}', '{"unknown": 1}'])
def test_a_file_that_cannot_be_read_is_no_file_that_holds_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "control.json").write_text(text)
    with pytest.raises(
        ControlFileError, match=r"control\.json says which weight versions are held, and cannot be read"
    ):
        ControlFile(tmp_path / "control.json").read()


@pytest.mark.parametrize(
    ("accepted", "waits"), [(None, "v00000005"), ("v00000003", "v00000005"), ("v00000005", None), ("v00000006", None)]
)
def test_a_held_version_waits_until_a_newer_one_was_let_through(accepted: str | None, waits: str | None) -> None:
    control = Control(held={"v00000004": HELD, "v00000005": HELD}, accepted=accepted)
    assert (control.waiting and control.waiting[0]) == waits
