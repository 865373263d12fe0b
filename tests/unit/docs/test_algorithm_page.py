"""docs/algorithm.md names only functions that exist, every algorithm, and the defaults in force."""

from __future__ import annotations

import importlib
import re
from functools import reduce

import pytest

from sao.config.algorithms import ALGORITHMS
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "algorithm.md").read_text()
LINKED = re.findall(r"\[`([a-z_]+\.(?!py`)[A-Za-z_.]+)`\]\(\.\./([a-z_/]+)\.py\)", PAGE)


@pytest.mark.parametrize(("name", "module"), LINKED)
def test_the_function_beside_an_equation_is_there(name: str, module: str) -> None:
    stem, *path = name.split(".")
    assert module.endswith(f"/{stem}"), f"{name} is linked to {module}.py"
    reduce(getattr, path, importlib.import_module(module.replace("/", ".")))


def test_the_equations_are_linked() -> None:
    named = {name for name, _ in LINKED}
    assert {
        "dis.importance_weights",
        "gae.skip_observation_gae",
        "gae.length_adaptive_lambda",
        "critic.explained_variance",
    } <= named


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http|#)([^)#]+)\)", PAGE))))
def test_every_link_leads_somewhere(target: str) -> None:
    assert (ROOT / "docs" / target).exists()


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_algorithm_has_its_row(algorithm: str) -> None:
    assert re.search(rf"^\| `{algorithm}`", PAGE, re.MULTILINE)
