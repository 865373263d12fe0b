"""Every metric of the reward service; docs/metrics.md has the same list."""

from __future__ import annotations

from typing import get_args

from prometheus_client import Counter, Gauge, Histogram, Summary

from sao.preference_changes import What

OUTCOMES = Counter("sao_reward_outcomes_total", "Scorings that ended, by kind of outcome.", ["kind"])
COMPONENT_SECONDS = Histogram(
    "sao_reward_component_seconds",
    "Time one scorer took for one trajectory, deadline misses included.",
    ["component"],
    buckets=(0.0001, 0.001, 0.01, 0.1, 0.5, 1, 5, 10, 30, 60),
)
COMPONENT_OUTCOMES = Counter(
    "sao_reward_component_outcomes_total", "Calls of a scorer that ended, by scorer and kind.", ["component", "kind"]
)
SCORER_RETRIES = Counter(
    "sao_reward_scorer_retries_total",
    "Calls over HTTP repeated within their deadline, by scorer and what they met (connection, or the status).",
    ["component", "reason"],
)
COMPONENT_VALUE = Summary("sao_reward_component_value", "Raw component values of scored trajectories.", ["component"])
VALUE = Summary("sao_reward_trajectory_value", "Rewards of scored trajectories under the preference of their scoring.")
BURIED = Counter(
    "sao_reward_buried_total", "Trajectories moved to the dead letters, by the outcome behind it.", ["kind"]
)
LOST = Counter("sao_reward_lost_deliveries_total", "Outcomes thrown away because another consumer owned the delivery.")
STORE_RETRIES = Counter("sao_reward_store_retries_total", "Calls to streams or board that failed and were tried again.")
IN_FLIGHT = Gauge("sao_reward_in_flight_trajectories", "Deliveries being scored now.")
WAITING = Gauge("sao_reward_waiting_trajectories", "Of these, those that wait for nothing but the run file's scorers.")
HACKING = Gauge(
    "sao_reward_hacking_alarm", "1 while the one component rises and the other collapses.", ["rising", "collapsing"]
)
OVERDUE = Gauge("sao_reward_overdue_threads", "Scorer threads still running after their deadline.", ["component"])
QUEUE = Gauge("sao_reward_queue_trajectories", "Entries on the trajectories stream, delivered or not.")
QUEUE_AGE = Gauge("sao_reward_queue_age_seconds", "Age of the oldest entry on the trajectories stream.")
PREFERENCE_VERSION = Gauge(
    "sao_reward_preference_version", "Newest preference version this process has used or stored."
)
PREFERENCES_RESTORED = Counter(
    "sao_reward_restored_preferences_total", "Times the board had lost its preferences and got them back."
)
PREFERENCE_FOLDER_ERRORS = Counter(
    "sao_reward_preference_folder_errors_total", "Times a preference could not be kept in the run's folder."
)
PREFERENCE_CHANGES = Counter(
    "sao_reward_preference_changes_total", "Changes of the preference made by this process, by kind.", ["what"]
)
# A rate over a counter that is not there yet is no data; the kinds are known, so each starts at 0.
for _what in get_args(What):
    PREFERENCE_CHANGES.labels(_what)
PREFERENCE_REFUSALS = Counter(
    "sao_reward_preference_refusals_total",
    "Changes of the preference refused by this process, by HTTP status.",
    ["status"],
)
KEEP_SECONDS = Histogram(
    "sao_reward_preference_keep_seconds",
    "Time until an accepted change of the preference was durable in the run's folder.",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
HELD = Gauge("sao_reward_preference_held", "Whether changes of the preference are held.")
SCHEDULED = Gauge("sao_reward_scheduled_preferences", "Switches of the preference that wait for their time or update.")
FEEDBACK_PARKED = Counter("sao_reward_feedback_parked_total", "Trajectories that began to wait for feedback.")
FEEDBACK_WAITING = Gauge("sao_reward_feedback_waiting_trajectories", "Trajectories that wait for feedback.")
FEEDBACK_OLDEST = Gauge("sao_reward_feedback_oldest_seconds", "How long the oldest of them has waited.")
FEEDBACK_KEPT = Gauge("sao_reward_feedback_kept_answers", "Answers whose trajectory does not wait (yet).")
FEEDBACK_JOINED = Counter("sao_reward_feedback_joined_total", "Answers joined to their trajectory.")
FEEDBACK_EXPIRED = Counter(
    "sao_reward_feedback_expired_total",
    "Trajectories nobody answered, by why they waited no longer and what became of them.",
    ["why", "disposal"],
)
FEEDBACK_REFUSED = Counter("sao_reward_feedback_refused_total", "Answers refused, by reason.", ["reason"])
FEEDBACK_UNUSED = Counter(
    "sao_reward_feedback_unused_total", "Answers kept and let go: their trajectories never waited for them."
)
FEEDBACK_DELAY = Histogram(
    "sao_reward_feedback_delay_seconds",
    "From the parking of a trajectory to its answer; 0 where that was early.",
    buckets=(0.1, 1, 5, 15, 60, 120, 300, 600, 1800, 3600, 14400),
)
ADAPTATION = Gauge(
    "sao_reward_adaptation_seconds", "Of the last switch: from its PUT until a trajectory was scored under it, here."
)
