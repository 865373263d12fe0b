"""What the trainer counts and shows: every item of docs/algorithm.md, "Metrics every update must log".

A number that an update leaves undefined (no token of that lag, no variance in the returns) shows as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from sao.config.schema import RunConfig
from sao.retention import RetentionMetrics
from sao.telemetry.metrics import watch_disk
from sao.trajectory import Trajectory
from sao.v1 import trajectory_pb2 as pb
from services.trainer.core.guards import GUARD_NAMES
from services.trainer.schedule import Gate, Phase

_LENGTHS = (16, 64, 256, 1024, 4096, 16384, 65536)
_TURNS = (1, 2, 3, 4, 8, 16, 32, 64)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
VERDICTS = ("accepted", "rejected_low", "rejected_high", "stale", "non_finite")
GROUP_OUTCOMES = ("complete", "filled", "dropped", "zero_spread")
"""`zero_spread` on top of one of the first two: all rewards were equal, no gradient follows."""
LAGS = ("0", "1", "2", "3_4", "5_8", "9_16", "17_up")

UPDATES = Counter("sao_trainer_updates_total", "Optimiser updates of this process, by kind", ["kind"])
UPDATE = Gauge("sao_trainer_update_number", "Policy updates made since the run began")
LAST_UPDATE = Gauge("sao_trainer_last_update_seconds", "Unix time of the last update; before the first, of the start")
CONSUMED = Counter("sao_trainer_consumed_trajectories_total", "Trajectories trained on", ["finish", "task"])
DROPPED = Counter("sao_trainer_dropped_trajectories_total", "Not trained, by reason", ["reason", "length", "task"])
MASKED = Counter("sao_trainer_masked_tokens_total", "Action tokens masked as stale", ["reason", "length", "task"])
BURIED = Counter("sao_trainer_buried_trajectories_total", "Sent to the dead letters, by reason", ["reason"])
RESCORED = Counter("sao_trainer_rescored_trajectories_total", "Sent back to the reward service for new components")

DIS = Gauge("sao_trainer_dis_tokens_fraction", "Share of action tokens by verdict and lag", ["verdict", "lag"])
RATIO = Gauge("sao_trainer_importance_ratio", "Importance ratio before masking", ["statistic"])
ROLLOUT_KL = Gauge("sao_trainer_rollout_kl_nats", "k3 estimate, policy against rollout (lag 0: the mismatch)", ["lag"])
REFERENCE_KL = Gauge("sao_trainer_reference_kl_nats", "k3 estimate, policy against the frozen initial policy")
ROUTING_DISAGREEMENT = Gauge(
    "sao_trainer_routing_disagreement_fraction", "Recorded experts that are not among the own router's choice"
)
ENTROPY = Gauge("sao_trainer_policy_entropy_nats", "Mean entropy at action tokens")
GRADIENT_NORM = Gauge("sao_trainer_gradient_norm", "Before clipping", ["network"])
LOSS = Gauge("sao_trainer_loss_value", "Loss of the last update", ["network"])
EXPLAINED_VARIANCE = Gauge("sao_trainer_explained_variance_ratio", "1 - Var(R-V)/Var(R) over the running window")
VALUE = Gauge("sao_trainer_value_mean", "Mean V at action tokens")
REWARD = Gauge("sao_trainer_reward_mean", "Mean reward of the last update, as trained")
LAG = Gauge("sao_trainer_lag_updates", "Lag of action tokens in the last update", ["statistic"])
VERSIONS = Gauge("sao_trainer_trajectory_versions", "Weight versions inside one trajectory", ["statistic"])
QUEUE_DEPTH = Gauge("sao_trainer_queue_trajectories", "On the scored stream and not yet consumed")
QUEUE_AGE = Gauge("sao_trainer_queue_age_seconds", "Age of the oldest entry of the scored stream")
LENGTH = Histogram("sao_trainer_trajectory_tokens", "Tokens of a trained trajectory", ["kind"], buckets=_LENGTHS)
TURNS = Histogram(
    "sao_trainer_trajectory_turns", "Actions of a trained trajectory", buckets=(1, 2, 3, 4, 8, 16, 32, 64)
)
TRUNCATED = Gauge("sao_trainer_truncated_fraction", "Share of the last update cut by a length or turn limit")
GROUPS = Counter("sao_trainer_groups_total", "Groups of rollouts of one prompt, by outcome", ["outcome"])
SKIPPED = Counter("sao_trainer_skipped_updates_total", "Updates that changed nothing because a pass was not finite")

PHASE = Gauge("sao_trainer_phase_active", "1 for the phase the next update belongs to", ["phase"])
CRITIC_GATE = Gauge("sao_trainer_critic_gate_state", "1 for how the critic's pre-training stands or ended", ["state"])
GUARD_HOLDS = Gauge("sao_trainer_publishing_held", "1 while this guard holds publishing", ["guard"])
ADAPTATION = Gauge(
    "sao_trainer_adaptation_seconds",
    "Of the last switch: from its PUT to the first update trained under it, and until the reward was back",
    ["stage"],
)

IDLE_SECONDS = Counter("sao_trainer_idle_seconds_total", "Time spent waiting for a trajectory")
BUSY_SECONDS = Counter("sao_trainer_busy_seconds_total", "Time spent on everything else", ["work"])
PUBLISHED = Counter("sao_trainer_published_versions_total", "Weight versions published")
PUBLISH_HELD = Counter("sao_trainer_held_publishes_total", "Versions not published because a weight was not finite")
CHECKPOINTS = Counter("sao_trainer_checkpoints_total", "Checkpoints written, by reason", ["reason"])
UNSETTLED = Gauge("sao_trainer_unsettled_trajectories", "Trained on, not yet in a durable checkpoint")
UNSETTLED_BYTES = Gauge("sao_trainer_unsettled_bytes", "Payload bytes of these")
UPDATE_SECONDS = Histogram("sao_trainer_update_seconds", "From the first trajectory to the step", buckets=_SECONDS)
STORE_RESTORED = Counter("sao_trainer_restored_stores_total", "Starts that found the store emptied, or an older one")
STORE_LOST = Counter("sao_trainer_lost_trajectories_total", "Accepted trajectories that a start missed in the store")
OUTAGES = Counter("sao_trainer_store_outages_total", "Calls that found the stream store unavailable")
RETENTION_ERASED = Counter(
    "sao_trainer_retention_erased_total", "What was erased because its time was over, by class of text", ["class"]
)
RETENTION_FAILED = Counter(
    "sao_trainer_retention_failed_passes_total", "Looks for such text that may have left some", ["class"]
)
RETENTION_PASSED = Gauge("sao_trainer_retention_passed_seconds", "Unix time of the last look that left none", ["class"])
RETENTION = RetentionMetrics(RETENTION_ERASED, RETENTION_FAILED, RETENTION_PASSED)

MAX_LAG = Gauge("sao_trainer_max_lag_updates", "trainer.max_lag: older tokens carry no weight")
STARVATION_LIMIT = Gauge("sao_trainer_starvation_limit_seconds", "trainer.starvation_timeout_s")
GUARD_LIMIT = Gauge(
    "sao_trainer_guard_limit", "Where this guard holds publishing, in its own unit; absent: it is off", ["guard"]
)

_TRUNCATED = (pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_TURN_LIMIT)


def show_settings(config: RunConfig) -> None:
    """What the run file sets as limits, for alerts to compare with; the clock of the first update begins here."""
    MAX_LAG.set(config.trainer.max_lag)
    STARVATION_LIMIT.set(config.trainer.starvation_timeout_s)
    for guard in GUARD_NAMES:
        if (limit := getattr(config.guards, guard)) != "off":
            GUARD_LIMIT.labels(guard).set(limit)
    for kind in ("policy", "critic"):
        UPDATES.labels(kind)
    LAST_UPDATE.set_to_current_time()
    watch_disk("run", config.run.dir)
    watch_disk("versions", config.versions_dir)


def length_bucket(action_tokens: int) -> str:
    """The class of lengths that drops are counted by, named by its upper end."""
    for top in _LENGTHS:
        if action_tokens <= top:
            return str(top)
    return "more"


def finish_name(trajectory: Trajectory) -> str:
    """`stop`, `length`, `turn_limit`, ..."""
    return pb.FinishReason.Name(trajectory.message.finish_reason).removeprefix("FINISH_REASON_").lower()


def is_truncated(trajectory: Trajectory) -> bool:
    """Whether a limit cut it."""
    return trajectory.message.finish_reason in _TRUNCATED


def count_dropped(trajectory: Trajectory, reason: str) -> None:
    """One trajectory that will not train."""
    DROPPED.labels(reason, length_bucket(trajectory.action_count), trajectory.message.task).inc()


def count_masked(trajectory: Trajectory, tokens: int) -> None:
    """Tokens of a trained trajectory that are too old to carry weight."""
    MASKED.labels("stale", length_bucket(trajectory.action_count), trajectory.message.task).inc(tokens)


def count_trained(trajectory: Trajectory) -> None:
    """One trajectory of a finished update."""
    CONSUMED.labels(finish_name(trajectory), trajectory.message.task).inc()
    LENGTH.labels("all").observe(len(trajectory.token_ids))
    LENGTH.labels("action").observe(trajectory.action_count)
    TURNS.observe(trajectory.turns)


def show_phase(phase: Phase, gate: Gate) -> None:
    """The phase of the update that begins, and how the critic's pre-training stands."""
    for one in Phase:
        PHASE.labels(one.value).set(one is phase)
    for state in Gate:
        CRITIC_GATE.labels(state.value).set(state is gate)


def show_update(numbers: Mapping[str, float]) -> None:
    """Set every gauge from the numbers of one update (services/trainer/core/metrics.py and the loop's own)."""

    def of(name: str) -> float:
        return numbers.get(name, math.nan)

    LAST_UPDATE.set_to_current_time()
    for verdict in VERDICTS:
        DIS.labels(verdict, "all").set(of(f"dis_{verdict}_fraction"))
        for lag in LAGS:
            DIS.labels(verdict, lag).set(of(f"dis_{verdict}_fraction.lag_{lag}"))
    for statistic in ("mean", "p99", "max"):
        RATIO.labels(statistic).set(of(f"ratio_{statistic}"))
    for statistic in ("mean", "max"):
        LAG.labels(statistic).set(of(f"lag_{statistic}"))
        VERSIONS.labels(statistic).set(of(f"versions_{statistic}"))
    ROLLOUT_KL.labels("all").set(of("kl_rollout"))
    ROLLOUT_KL.labels("0").set(of("kl_rollout.lag_0"))
    REFERENCE_KL.set(of("kl_reference"))
    ENTROPY.set(of("entropy"))
    ROUTING_DISAGREEMENT.set(of("routing_disagreement"))
    for network in ("policy", "critic"):
        GRADIENT_NORM.labels(network).set(of(f"{network}_grad_norm"))
        LOSS.labels(network).set(of(f"{network}_loss"))
    EXPLAINED_VARIANCE.set(of("explained_variance"))
    VALUE.set(of("value_mean"))
    REWARD.set(of("reward_mean"))
    TRUNCATED.set(of("truncated_fraction"))
    QUEUE_DEPTH.set(of("queue_depth"))
    QUEUE_AGE.set(of("queue_age_s"))
