from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client import REGISTRY

from sao.telemetry.metrics import watch_disk


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def shown(folder: str) -> float:
    value = REGISTRY.get_sample_value("sao_process_disk_used_ratio", {"folder": folder})
    assert value is not None
    return value


def test_a_disk_is_read_at_each_scrape_as_df_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch_disk("watched", tmp_path)
    for used in (60, 72):
        # 10 of 100 are reserved for root.
        monkeypatch.setattr(shutil, "disk_usage", lambda _path, used=used: Usage(100, used, 90 - used))
        assert shown("watched") == pytest.approx(used / 90)


def test_a_folder_that_is_not_made_yet_is_on_the_disk_of_its_nearest_parent(tmp_path: Path) -> None:
    watch_disk("later", tmp_path / "a" / "b")
    assert 0.0 < shown("later") <= 1.0


def test_a_disk_that_cannot_be_read_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_path: Path) -> Usage:
        raise OSError(5, "Input/output error")

    watch_disk("broken", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", refuses)
    assert math.isnan(shown("broken"))
