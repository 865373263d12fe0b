"""Lines about weight versions that are not rolled out. None while publishing goes on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from sao.config import RunConfig
from sao.weights.control import CONTROL_FILE, Control, ControlFile, ControlFileError, Held, Pin


def held_notices(config: RunConfig, named: Path) -> list[str]:
    """What a person should know of it, read now; `named` is what commands call the run: its folder, or a run file."""
    try:
        control = ControlFile(config.versions_dir / CONTROL_FILE).read()
    except ControlFileError as error:
        return [f"WEIGHTS SERVICE CANNOT START: {error}"]
    return list(_lines(control, shlex.quote(str(named))))


def _lines(control: Control, run: str) -> Iterator[str]:
    resume = f"`sao weights resume {run}` lets it go on"
    if (pin := control.pin) is not None:
        what = f"engines stay on {pin.version}, by {pin.by}"
        yield f"PUBLISHING HELD, {what} {_since(pin)}{_why(pin)}; {resume} (docs/weights.md)"
    elif control.waiting is not None:
        version, held = control.waiting
        serving = f"engines stay on {control.accepted or 'what they have'}"
        yield f"VERSION {version} HELD by {held.by} {_since(held)}, {serving}{_why(held)}; {resume} (docs/weights.md)"


def _since(one: Pin | Held) -> str:
    return f"since {datetime.fromtimestamp(one.since_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _why(one: Pin | Held) -> str:
    return f": {one.reason}" if one.reason else ""
