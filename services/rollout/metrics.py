"""What a rollout worker counts."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from sao.retention import RetentionMetrics

_DISK_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

EPISODES = Counter("sao_rollout_episodes_total", "Finished episodes", ["finish"])
EPISODES_IN_FLIGHT = Gauge("sao_rollout_episodes_in_flight", "Episodes running or waiting to be published")
ATTEMPTS_FAILED = Counter("sao_rollout_attempts_failed_total", "Attempts given up, by reason", ["kind"])
LEASES = Counter("sao_rollout_leases_total", "Prompt leases, by what became of them", ["event"])
EPISODE_SECONDS = Histogram("sao_rollout_episode_seconds", "From dispatch to the last token", buckets=_SECONDS)
TOKENS = Counter("sao_rollout_tokens_total", "Tokens of finished episodes", ["kind"])
TURN_SECONDS = Histogram("sao_rollout_turn_seconds", "Engine time of one turn", ["engine"], buckets=_SECONDS)
ENVIRONMENT_SECONDS = Histogram("sao_rollout_environment_seconds", "Environment time of one turn", buckets=_SECONDS)
ENGINE_ERRORS = Counter("sao_rollout_engine_errors_total", "Failed turns", ["engine", "kind"])
ENGINE_TURNS = Gauge("sao_rollout_engine_turns_in_flight", "Turns of this worker on an engine", ["engine"])
ENGINE_IDLE = Counter("sao_rollout_engine_idle_seconds_total", "Time without a turn of this worker", ["engine"])
WITHHELD_SECONDS = Histogram(
    "sao_rollout_withheld_seconds", "Finished turns waiting for their version to be verified", buckets=_SECONDS
)
ROTATION_WAIT_SECONDS = Histogram(
    "sao_rollout_rotation_wait_seconds", "Turns waiting for an engine in rotation", buckets=_SECONDS
)
PUBLISHED = Counter("sao_rollout_published_total", "Trajectories handed to ingest, by its answer", ["status"])
PUBLISH_RETRIES = Counter("sao_rollout_publish_retries_total", "Publish calls repeated, by status code", ["code"])
PUBLISH_SECONDS = Histogram(
    "sao_rollout_publish_seconds", "Until ingest answered, the spool's write and retries included", buckets=_SECONDS
)
DEAD = Counter("sao_rollout_dead_trajectories_total", "Trajectories written to the dead folder", ["code"])
SPOOLED = Gauge("sao_rollout_spooled_trajectories", "Finished trajectories on disk that ingest does not have yet")
SPOOL_BYTES = Gauge("sao_rollout_spool_bytes", "Their size; no prompt is leased from rollout.spool_mb on")
SPOOL_LIMIT = Gauge("sao_rollout_spool_limit_bytes", "rollout.spool_mb, in bytes")
SPOOL_WRITE_SECONDS = Histogram(
    "sao_rollout_spool_write_seconds",
    "From a finished episode until its file and directory are fsynced",
    buckets=_DISK_SECONDS,
)
SPOOL_ERRORS = Counter(
    "sao_rollout_spool_errors_total",
    "What the disk refused (ENOSPC: full, EROFS: read-only); publishing goes on from memory",
    ["operation", "error"],
)
SPOOL_SET_ASIDE = Counter("sao_rollout_spool_set_aside_total", "Files of the spool that a crash or the disk damaged")
RETENTION_ERASED = Counter(
    "sao_rollout_retention_erased_total", "What was erased because its time was over, by class of text", ["class"]
)
RETENTION_FAILED = Counter(
    "sao_rollout_retention_failed_passes_total", "Looks for such text that may have left some", ["class"]
)
RETENTION_PASSED = Gauge("sao_rollout_retention_passed_seconds", "Unix time of the last look that left none", ["class"])
RETENTION = RetentionMetrics(RETENTION_ERASED, RETENTION_FAILED, RETENTION_PASSED)
REPEATED = Counter("sao_rollout_repeated_completions_total", "Completions equal to the one before for the same prompt")
