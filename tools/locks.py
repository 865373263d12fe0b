"""Derive every lock from the two environments that `make setup` built: `python tools/locks.py [--check]`.

An environment holds more than one service needs; a service's lock is the closure of what the project declares for it.
After changing a dependency: install it into .venv, run this, commit the locks.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = {
    "light.lock": ("traces",),
    "reward.lock": ("rest", "traces"),
    "weights.lock": ("rest", "traces"),
    "trainer.lock": ("traces", "trainer"),
    "dev.lock": ("embedded", "report", "rest", "traces", "trainer", "dev"),
}
"""Which extras each lock holds, beside the project's own dependencies."""

EARLIER_PYTHON = {'async-timeout==5.0.1; python_full_version < "3.11.3"': {"redis", "valkey"}}
"""What an earlier Python 3.11 than the environment's needs beside it, and for whom: Debian 12 has 3.11.2."""

# Of the installed distributions, as JSON: name, version, requirements that apply here by extra.
_INSTALLED = """
import json, re
from importlib import metadata
from pip._vendor.packaging.requirements import Requirement
rows = {}
for one in metadata.distributions():
    needs = []
    for text in one.requires or []:
        need = Requirement(text)
        extras = [""] + [e for e in one.metadata.get_all("Provides-Extra") or []]
        for extra in extras:
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                needs.append([extra if need.marker is not None and "extra" in str(need.marker) else "",
                              need.name, sorted(need.extras)])
                break
    rows[one.metadata["Name"]] = {"version": one.version, "needs": needs}
print(json.dumps(rows))
"""

Installed = Mapping[str, tuple[str, list[tuple[str, str, list[str]]]]]
"""Version and (extra, required name, its extras) by normalised name."""


def normalised(name: str) -> str:
    """The name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(python: Path) -> Installed:
    """What an environment holds."""
    answer = subprocess.run([str(python), "-I", "-c", _INSTALLED], check=True, capture_output=True, text=True)  # noqa: S603
    rows = json.loads(answer.stdout)
    return {
        normalised(name): (row["version"], [(extra, normalised(need), extras) for extra, need, extras in row["needs"]])
        for name, row in rows.items()
    }


def closure(present: Installed, extras: Iterable[str]) -> dict[str, str]:
    """Name and version of everything that `sao` with these extras needs, directly or not.

    KeyError names a declared dependency that is not installed.
    """
    pins: dict[str, str] = {}
    waiting = [("sao", extra) for extra in ("", *extras)]
    done: set[tuple[str, str]] = set()
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in done:
            continue
        done.add((name, extra))
        version, needs = present[name]
        if name != "sao":
            pins[name] = version
        for of_extra, need, need_extras in needs:
            if of_extra == extra:
                waiting += [(need, each) for each in ("", *need_extras)]
    return dict(sorted(pins.items()))


def text(pins: Mapping[str, str], header: str) -> str:
    """A lock file."""
    lines = [f"{name}=={version}\n" for name, version in pins.items()]
    lines += [f"{line}\n" for line, wanted_by in EARLIER_PYTHON.items() if wanted_by & pins.keys()]
    return "".join([f"# {header}\n", *sorted(lines, key=lambda line: line.partition("==")[0])])


def derived() -> dict[Path, str]:
    """Every lock by its path."""
    present = installed(ROOT / ".venv/bin/python")
    known = {extra for extra, _, _ in present["sao"][1]}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if not set(declared) <= known:
        msg = f"extras {sorted(set(declared) - known)} are new: run `.venv/bin/pip install -e . --no-deps` first"
        raise RuntimeError(msg)
    locks = {}
    for name, extras in LOCKS.items():
        mine = [extra for extra in extras if extra in declared]
        header = f"Full pins of sao[{','.join(mine)}], Python 3.11, CPU torch; derived by tools/locks.py."
        locks[ROOT / "requirements" / name] = text(closure(present, mine), header)
    engine = {name: row[0] for name, row in installed(ROOT / ".venv-engine/bin/python").items()}
    for name in ("pip", "sglang-cpuref"):
        engine.pop(name, None)
    header = "Full pins of a real SGLang on a CPU, installed with --no-deps; derived by tools/locks.py."
    locks[ROOT / "engine/requirements.lock"] = text(dict(sorted(engine.items())), header)
    return locks


def main() -> int:
    """Write the locks, or say which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a lock differs")
    check = parser.parse_args().check
    stale = {path: content for path, content in derived().items() if not path.exists() or path.read_text() != content}
    for path, content in stale.items():
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        sys.stdout.write(f"{path.relative_to(ROOT)} {'is out of date' if check else 'written'}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
