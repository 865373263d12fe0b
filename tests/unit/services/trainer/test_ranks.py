"""What rank 0 may rely on when a collective call has returned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from services.trainer.core.update import Update, UpdateSettings
from services.trainer.ranks import Ranks
from tests.unit.services.trainer.core.toy import toy_backend


def test_a_save_ends_when_every_rank_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = toy_backend()
    calls: list[str] = []
    monkeypatch.setattr(backend, "save", lambda _: calls.append("save"))

    def waits_for_all(values: Sequence[float]) -> list[float]:
        calls.append("sum_over_ranks")
        return list(values)

    monkeypatch.setattr(backend, "sum_over_ranks", waits_for_all)
    Ranks(backend, Update(backend, UpdateSettings())).save(tmp_path)
    assert calls == ["save", "sum_over_ranks"]
