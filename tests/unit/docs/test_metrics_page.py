"""Code and docs name the same metrics, in the house's form."""

from __future__ import annotations

import re

import pytest

from tools.metrics_docs import MODULES, PAGE, declared, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tools.metrics_docs`"


@pytest.mark.parametrize("service", MODULES)
def test_names_tell_their_service(service: str) -> None:
    rows = declared(service)
    assert rows
    for name, _, _, meaning in rows:
        assert re.fullmatch(rf"sao_{service}_[a-z0-9_]+", name)
        assert meaning
