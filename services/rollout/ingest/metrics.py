"""What the ingest counts."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from sao.config.schema import RunConfig
from sao.retention import RetentionMetrics
from sao.streams.base import AppendStatus
from sao.telemetry.metrics import watch_disk

TRAJECTORIES = Counter("sao_ingest_trajectories_total", "Published trajectories, by the answer", ["status"])
UNDECODABLE = Counter("sao_ingest_undecodable_requests_total", "Requests whose bytes were no message of their kind")
UNNOTED = Counter("sao_ingest_unnoted_trajectories_total", "Accepted, but not written down beside the store")
LAST_ACCEPTED = Gauge(
    "sao_ingest_last_accepted_seconds", "Unix time of the last accepted trajectory; before the first, of the start"
)
VIOLATIONS = Counter("sao_ingest_violations_total", "Violated invariants", ["code"])
TRAJECTORY_TOKENS = Histogram(
    "sao_ingest_trajectory_tokens", "Length of accepted trajectories", buckets=[2**n for n in range(4, 19)]
)
PUBLISH_SECONDS = Histogram("sao_ingest_publish_seconds", "Validation and append of one trajectory")
LEASES = Counter("sao_ingest_leases_total", "Prompt leases, by what became of them", ["event"])
LEASES_LIVE = Gauge("sao_ingest_leases_live", "Leases held by workers now")
LEASES_EXPIRED = Gauge("sao_ingest_leases_expired", "Leases that ran out and wait to be given again")
FRONTIER = Gauge("sao_ingest_frontier_ordinal", "Every prompt below this ordinal is done")
ADMISSION = Gauge("sao_ingest_admission_state", "1 for what the last lease request was answered", ["state"])
ADMISSION_LIMIT = Gauge("sao_ingest_admission_limit_trajectories", "The most trajectories leased or unconsumed")
UNCONSUMED = Gauge("sao_ingest_unconsumed_trajectories", "Durable and not yet consumed by the trainer")
STORE_MEMORY = Gauge("sao_ingest_store_memory_ratio", "Used share of the stream store's memory bound")
STORE_PRESSURE = Gauge(
    "sao_ingest_store_pressure",
    "1 for the most of the last 5 s: room, mark (trajectories are refused), full (the store itself refuses)",
    ["state"],
)
STORE_PRESSURE_SINCE = Gauge(
    "sao_ingest_store_pressure_since_seconds", "Unix time at which the store came to its mark; 0 while there is room"
)
BACK_PRESSURE = Gauge("sao_ingest_back_pressure_ratio", "redis.back_pressure_at: the mark of the store's memory")
EPISODE_DEADLINE = Gauge(
    "sao_ingest_episode_deadline_seconds", "ingest.episode_deadline_s: the longest an episode lasts"
)
STORE_ERRORS = Counter("sao_ingest_store_errors_total", "Calls that the stream store did not serve", ["kind"])
RETENTION_ERASED = Counter(
    "sao_ingest_retention_erased_total", "What was erased because its time was over, by class of text", ["class"]
)
RETENTION_FAILED = Counter(
    "sao_ingest_retention_failed_passes_total", "Looks for such text that may have left some", ["class"]
)
RETENTION_PASSED = Gauge("sao_ingest_retention_passed_seconds", "Unix time of the last look that left none", ["class"])
RETENTION = RetentionMetrics(RETENTION_ERASED, RETENTION_FAILED, RETENTION_PASSED)


def show_settings(config: RunConfig) -> None:
    """What the run file sets as limits, for alerts to compare with; the clock of the first trajectory begins here."""
    ADMISSION_LIMIT.set(config.admission_limit)
    BACK_PRESSURE.set(config.redis.back_pressure_at)
    EPISODE_DEADLINE.set(config.ingest.episode_deadline_s)
    LAST_ACCEPTED.set_to_current_time()
    # A counter that is there before it rises: the first rise is one.
    for status in AppendStatus:
        TRAJECTORIES.labels(status.value)
    for kind in ("full", "unavailable"):
        STORE_ERRORS.labels(kind)
    watch_disk("run", config.run.dir)
