"""The locks hold what the project declares, at versions that it allows, and nothing they must not."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.locks import EARLIER_PYTHON, LOCKS, ROOT, Installed, closure, normalised, text

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(path: Path) -> dict[str, str]:
    """Version by name."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_holds_every_declared_dependency_at_an_allowed_version(lock: str) -> None:
    held = pins(ROOT / "requirements" / lock)
    declared = list(PROJECT["dependencies"])
    for extra in LOCKS[lock]:
        declared += PROJECT["optional-dependencies"].get(extra, [])

    for one in map(Requirement, declared):
        assert canonicalize_name(one.name) in held, f"{one} is not in {lock}: run `make locks`"
        assert one.specifier.contains(held[canonicalize_name(one.name)]), f"{one} against {lock}: run `make locks`"


@pytest.mark.parametrize("lock", ["light.lock", "reward.lock", "weights.lock"])
def test_a_light_service_carries_no_torch(lock: str) -> None:
    assert not {"torch", "transformers", "deepspeed", "triton"} & pins(ROOT / "requirements" / lock).keys()


def test_locks_agree_with_each_other() -> None:
    everything = pins(ROOT / "requirements" / "dev.lock")

    for lock in LOCKS:
        assert pins(ROOT / "requirements" / lock).items() <= everything.items()


def test_both_environments_ask_for_a_torch_without_cuda() -> None:
    for path in (ROOT / "requirements/dev.lock", ROOT / "engine/requirements.lock"):
        assert pins(path)["torch"].endswith("+cpu")
        assert not [name for name in pins(path) if name.startswith("nvidia-") and name != "nvidia-ml-py"]


def test_the_engine_lock_pins_the_engine_and_not_the_kit() -> None:
    held = pins(ROOT / "engine/requirements.lock")

    assert held["sglang"] == "0.5.23"
    assert not {"sglang-cpuref", "sao"} & held.keys()


def test_a_closure_follows_extras_and_leaves_out_what_nobody_needs() -> None:
    present: Installed = {
        "sao": ("1", [("", "web", ["fast"]), ("report", "plots", [])]),
        "web": ("2", [("", "base", []), ("fast", "speed", []), ("slow", "crawl", [])]),
        "plots": ("3", [("", "base", [])]),
        "base": ("4", []),
        "speed": ("5", [("", "web", [])]),
        "crawl": ("6", []),
    }

    assert closure(present, []) == {"base": "4", "speed": "5", "web": "2"}
    assert closure(present, ["report"]) == {"base": "4", "plots": "3", "speed": "5", "web": "2"}


def test_a_missing_dependency_is_named() -> None:
    with pytest.raises(KeyError, match="gone"):
        closure({"sao": ("1", [("", "gone", [])])}, [])


def test_names_are_compared_as_pypi_does() -> None:
    assert normalised("Mypy_Extensions") == "mypy-extensions"
    assert text({"a": "1"}, "why") == "# why\na==1\n"


def test_the_locks_serve_the_earliest_python_3_11_too() -> None:
    """They are derived on one patch release and installed without dependencies on any."""
    known = {Requirement(line).name for line in EARLIER_PYTHON}
    missed = set()
    for one in metadata.distributions():
        for need in map(Requirement, one.requires or []):
            here, earliest = (
                need.marker is None or need.marker.evaluate({"extra": "", **python})
                for python in ({}, {"python_full_version": "3.11.0"})
            )
            if earliest and not here:
                missed.add(need.name)
                assert normalised(one.metadata["Name"]) in set().union(*EARLIER_PYTHON.values())
    assert missed <= known
    for lock in LOCKS:
        lines = (ROOT / "requirements" / lock).read_text().splitlines()
        assert [line for line in EARLIER_PYTHON if line not in lines] == [], lock


def test_a_lock_says_for_which_python_a_pin_is() -> None:
    (line,) = EARLIER_PYTHON
    assert text({"a": "1", "redis": "8"}, "why") == f"# why\na==1\n{line}\nredis==8\n"
