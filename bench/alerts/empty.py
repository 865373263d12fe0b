"""What a healthy short run has no data of, and why."""

from __future__ import annotations

from collections.abc import Mapping

NEVER_COUNTED = "counts what went wrong, by labels that are not known before: no series until the first"
MISMATCH = "instance:sao_trainer_mismatch_kl_nats:avg10m"
NO_LAG_0 = "undefined in updates without a token of lag 0: in a run of a minute the few readings may all be"
ENTROPY_SLOPE = "instance:sao_trainer_entropy_slope_nats_per_update:deriv10m"
TOO_SHORT = "a slope needs two readings, 15 s apart: a fast machine trains no longer than that"
SERIES: Mapping[str, str] = {
    "sao_trainer_buried_trajectories_total": NEVER_COUNTED,
    "sao_trainer_dropped_trajectories_total": NEVER_COUNTED,
    "sao_trainer_groups_total": "counts groups of rollouts: sao has none",
    "sao_reward_buried_total": NEVER_COUNTED,
    'sao_reward_outcomes_total{kind!="scored"}': NEVER_COUNTED,
    "sao_rollout_attempts_failed_total": NEVER_COUNTED,
    "sao_rollout_dead_trajectories_total": NEVER_COUNTED,
    "sao_rollout_engine_errors_total": NEVER_COUNTED,
    "sao_rollout_spool_errors_total": NEVER_COUNTED,
    "sao_weights_engine_restarts_total": NEVER_COUNTED,
    'sao_weights_rounds_total{result!="ok"}': NEVER_COUNTED,
    "sao_weights_unavailable_total": NEVER_COUNTED,
    "sao_weights_versions_refused_total": NEVER_COUNTED,
    MISMATCH: NO_LAG_0,
    ENTROPY_SLOPE: TOO_SHORT,
    'sao_ingest_admission_state{state="finished"}': "0 or 1 from the first lease request on",
}
"""By metric, or by metric and matchers; none of them has to be empty."""
EXPRESSIONS: Mapping[str, str] = {
    MISMATCH: NO_LAG_0,
    ENTROPY_SLOPE: TOO_SHORT,
    "SaoServiceDown": "lists the services that are missing: none is",
    "SaoIngestBackPressure": "there is room: sao_ingest_store_pressure_since_seconds is 0",
    "fleet/Instances down/A": "shows 0 of each run",
}
"""By alert, recorded series or panel, where each series it reads has data and it still has none."""
