"""Bounds on log-prob differences."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sao.weights.manifest import CanarySequence
from services.weights.canary import Calibrated, CalibrateOnFirst, CanaryError, Exact, differences, percentile_99


def test_exact_allows_the_tolerance_and_not_more() -> None:
    Exact(1e-4).check([0.0, 1e-4])
    with pytest.raises(CanaryError, match="log-prob 1 of 2"):
        Exact(1e-4).check([0.0, 1.1e-4])
    with pytest.raises(CanaryError):
        Exact(1e-4).check_token(1e-3)


@pytest.mark.parametrize("found", [[-1.0], [-1.0, math.nan], [math.inf, -1.0]])
def test_differences_need_finite_log_probs_of_each_token(found: list[float]) -> None:
    with pytest.raises(CanaryError, match="expected 2 finite"):
        differences(CanarySequence(token_ids=[1, 2, 3], logprobs=[-1.0, -2.0]), found)


def test_percentile_99_is_nearest_rank() -> None:
    assert percentile_99([float(value) for value in range(100)]) == 98.0
    assert percentile_99([3.0]) == 3.0


def test_bfloat16_calibrates_on_the_first_version_and_remembers(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    first = [0.01] * 500 + [0.03] * 12
    CalibrateOnFirst(file, 0.05).check(first)
    later = CalibrateOnFirst(file, 0.05)
    later.check([0.02] * 512)
    with pytest.raises(CanaryError, match="mean"):
        later.check([0.03] * 512)
    with pytest.raises(CanaryError, match="p99"):
        later.check([0.0] * 500 + [0.1] * 12)
    with pytest.raises(CanaryError, match="generated"):
        later.check_token(0.1)


def test_bfloat16_calibration_needs_enough_tokens_and_refuses_a_wrong_layout(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    with pytest.raises(CanaryError, match="needs 512"):
        CalibrateOnFirst(file, 0.05).check([0.01] * 511)
    with pytest.raises(CanaryError, match="layout"):
        CalibrateOnFirst(file, 0.05).check([0.8] * 512)
    assert not file.exists()
    assert Calibrated.from_first([0.01] * 512, 0.05).p99 == 0.01
