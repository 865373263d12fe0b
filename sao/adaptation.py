"""How fast a run follows a preference: what is written down for it, and which use of a preference is the first.

Four times count from `Preference.stored_s`: the first trajectory scored under it, the first update trained on one, the
first version made by such an update that an engine is verified to serve, and the reward's recovery. Each is a metric of
the service that sees it, for the last switch; sao.curves.adaptations has all of a run's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from sao.atomic import append_line
from sao.preference import Preference
from sao.preference_changes import PreferenceChange

SERVED_FILE = "served.jsonl"
"""In the run's folder: a line whenever an engine was verified to serve a version, by the weights service."""
AUDIT_FILE = "preferences/audit.jsonl"
"""In the run's folder: every change of the preferences, by the reward service."""


class Served(BaseModel):
    """A line of `served.jsonl`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    engine: str
    at_s: float
    """Unix seconds."""


def note_served(run_dir: Path, served: Served) -> None:
    """Add a line; OSError when the disk refuses."""
    append_line(run_dir / SERVED_FILE, served.model_dump_json().encode())


def first_served(run_dir: Path) -> dict[str, float]:
    """Unix seconds at which each version was first served by any engine; a torn last line is left out."""
    found: dict[str, float] = {}
    for served, _ in read_served(run_dir / SERVED_FILE):
        found[served.version] = min(found.get(served.version, served.at_s), served.at_s)
    return found


def read_served(path: Path, start: int = 0) -> Iterator[tuple[Served, int]]:
    """Every complete line from byte `start` on, each with the offset after it."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            yield Served.model_validate_json(line), start


def kept_preferences(run_dir: Path) -> list[Preference]:
    """Every preference that the run's audit log has, ascending; a torn or damaged line is left out."""
    path = run_dir / AUDIT_FILE
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found: dict[int, Preference] = {}
    for line in lines:
        try:
            preference = PreferenceChange.model_validate_json(line).preference
        except ValidationError:
            continue
        if preference is not None:
            found[preference.version] = preference
    return [found[version] for version in sorted(found)]


class FirstUse:
    """Tells a process when it meets a preference for the first time; the one that it meets first is no switch."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._newest: int | None = None

    def seconds(self, preference: Preference) -> float | None:
        """Since it was stored, when this is the first use of a newer one; else none."""
        newest, self._newest = self._newest, max(self._newest or 0, preference.version)
        if newest is None or preference.version <= newest or preference.stored_s <= 0:
            return None
        return max(self._wall_clock() - preference.stored_s, 0.0)
