"""What the weights service counts."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LOGPROB = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)

STEP_SECONDS = Histogram("sao_weights_step_seconds", "One step of a round", ["step"], buckets=_SECONDS)
ROUND_SECONDS = Histogram("sao_weights_round_seconds", "A whole round that succeeded", buckets=_SECONDS)
ROUNDS = Counter("sao_weights_rounds_total", "Rounds by result", ["engine", "result"])
ENGINE_STATE = Gauge("sao_weights_engine_state", "1 for the state an engine is in", ["engine", "state"])
ENGINES_QUARANTINED = Gauge("sao_weights_quarantined_engines", "Engines that serve nobody because a round failed")
PUBLISHED_UPDATE = Gauge("sao_weights_published_update", "Update of the version that engines shall serve")
SERVING_UPDATE = Gauge("sao_weights_serving_update", "Update of the version an engine has proven to serve", ["engine"])
LAG_UPDATES = Gauge("sao_weights_lag_updates", "Published update minus serving update", ["engine"])
CANARY_DIFFERENCE = Gauge(
    "sao_weights_canary_difference_nats", "Largest |log-prob difference| of the last canary", ["engine"]
)
CANARY_DIFFERENCES = Histogram(
    "sao_weights_canary_max_difference_nats", "Largest |log-prob difference| of each canary", buckets=_LOGPROB
)
PUBLISH_TO_SERVING_SECONDS = Histogram(
    "sao_weights_publish_to_serving_seconds", "From the manifest's creation until an engine serves it", buckets=_SECONDS
)
ADAPTATION = Gauge(
    "sao_weights_adaptation_seconds",
    "Of the last switch: from its PUT until an engine served the first version trained under it",
)
NOT_NOTED = Counter("sao_weights_unnoted_servings_total", "Lines of served.jsonl that the disk refused")
VERSIONS_REFUSED = Counter("sao_weights_versions_refused_total", "Versions that will never serve", ["reason"])
PUBLISHING_HELD = Gauge("sao_weights_publishing_held", "1 while newer versions wait, by who holds them", ["by"])
CANARY_DRIFT = Gauge(
    "sao_weights_canary_drift_nats", "Mean |log-prob difference| of the newest version's canary to the last one's"
)
VERSIONS_COLLECTED = Counter("sao_weights_versions_collected_total", "Old versions removed from the store")
STAGING_SECONDS = Histogram(
    "sao_weights_staging_seconds", "Reading a version's files and comparing them, while engines serve", buckets=_SECONDS
)
PAUSE_SECONDS = Histogram(
    "sao_weights_pause_seconds", "From asking an engine to pause until it has resumed", ["engine"], buckets=_SECONDS
)
PAUSED_RATIO = Gauge("sao_weights_paused_ratio", "Share of the time since the start, paused", ["engine"])
LOADED_BYTES = Counter("sao_weights_loaded_bytes_total", "Size of the versions that an engine has loaded", ["engine"])
SLOT_WAIT_SECONDS = Histogram(
    "sao_weights_slot_wait_seconds", "From asking to leave rotation for a round until an engine may", buckets=_SECONDS
)
ENGINES_OUT = Gauge("sao_weights_out_engines", "Engines that left rotation for a round and are not back yet")
RESTARTS_SEEN = Counter("sao_weights_engine_restarts_total", "Engines found with other weights than ours", ["engine"])
STORE_ERRORS = Counter("sao_weights_unavailable_total", "Board or store did not answer", ["what"])


def forget(engine_id: str) -> None:
    """Show nothing any more of an engine that left: its last state would stand there for ever."""
    for metric in list(globals().values()):
        if isinstance(metric, MetricWrapperBase) and "engine" in metric._labelnames:  # noqa: SLF001 - no public way
            metric.remove_by_labels({"engine": engine_id})
