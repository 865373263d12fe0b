"""What alerts compare with is what the run file says."""

from __future__ import annotations

import time

from prometheus_client import REGISTRY

from sao.config import load_run_config
from services.trainer import metrics


def shown(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_limits_are_the_run_files_and_a_guard_that_is_off_has_none() -> None:
    metrics.GUARD_LIMIT.clear()
    sets = ["trainer.max_lag=7", "trainer.starvation_timeout_s=90.0", 'guards.entropy_slope="off"']
    metrics.show_settings(load_run_config(None, [*sets, "guards.mismatch_kl=0.3"], env={}))
    assert shown("sao_trainer_max_lag_updates") == 7
    assert shown("sao_trainer_starvation_limit_seconds") == 90
    assert shown("sao_trainer_guard_limit", guard="mismatch_kl") == 0.3
    assert shown("sao_trainer_guard_limit", guard="entropy_slope") is None
    assert {shown("sao_trainer_updates_total", kind=kind) is None for kind in ("policy", "critic")} == {False}


def test_the_clock_begins_at_the_start_and_each_update_sets_it_anew() -> None:
    before = time.time()
    metrics.show_settings(load_run_config(None, [], env={}))
    started = shown("sao_trainer_last_update_seconds")
    assert started is not None
    assert before <= started
    metrics.LAST_UPDATE.set(0)
    metrics.show_update({})
    assert (shown("sao_trainer_last_update_seconds") or 0) >= started
