from __future__ import annotations

from pathlib import Path

import pytest

from sao.config.docs import BEGIN, END, PAGE, with_current_tables
from sao.config.keys import all_settings, nested_tables
from sao.config.load import preset_names

REPOSITORY = Path(__file__).parents[4]
TEXT = (REPOSITORY / PAGE).read_text(encoding="utf-8")


def test_the_page_is_current() -> None:
    assert with_current_tables(TEXT) == TEXT, "run: python -m sao.config.docs"


def test_every_setting_of_ours_says_what_it_is() -> None:
    silent = [s.key for s in all_settings() if not s.field.description and s.section != "preference"]
    inner = [(s.key, model) for s in all_settings() for model in nested_tables(s.field)]
    silent += [
        f"{key}.{name}"
        for key, model in inner
        for name, field in model.model_fields.items()
        if not field.description and name != "kind"
    ]
    assert silent == []


def test_every_preset_is_on_the_page() -> None:
    assert [name for name in preset_names() if f"`{name}`" not in TEXT] == []


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="settings: begin"):
        with_current_tables(END + BEGIN)
