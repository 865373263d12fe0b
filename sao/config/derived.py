"""Numbers that follow from a configuration: what `sao check` prints beside the settings themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sao.config.model_size import cache_values_per_token, parameters
from sao.config.schema import RunConfig
from sao.routing import expected_routing

MIB = 2**20
BYTES_PER_TOKEN = 9
"""On the wire: a varint of at most 5 bytes for the id and 4 for the log-prob."""
ARCHIVED_BYTES_PER_TOKEN = 16
"""Of an action token, on top: value, advantage, ratio and weight."""
BYTES_PER_TRAJECTORY = 4096
"""Ids, versions, task payload, stream entries and Redis' own bookkeeping for one trajectory, generously."""
TRAINING_BYTES = 16
"""Per trained parameter with AdamW: float32 4 weight + 4 gradient + 8 moments; bfloat16 2 + 2 + 8 + 4 master copy."""

Unit = Literal["", "bytes", "tokens", "updates", "trajectories", "parameters", "seconds"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One derived number: its name, its value (None: cannot be known here), its unit and how it comes about."""

    name: str
    value: float | None
    unit: Unit
    because: str


def figures(config: RunConfig) -> list[Figure]:
    """Every derived number, in the order in which they are printed."""
    trainer, rollout = config.trainer, config.rollout
    per_update = trainer.trajectories_per_update
    count = policy_parameters(config)
    return [
        Figure("policy learning rate", trainer.policy_lr, "", _learning_rate_rule(config)),
        *_critic_first(config),
        Figure("rollouts per prompt", config.samples, "", "group.size for the algorithms that compare a group, else 1"),
        Figure("tokens per update", per_update * rollout.max_tokens, "tokens", "at most: trajectories x max_tokens"),
        Figure(
            "action tokens per update", per_update * action_tokens(config), "tokens", "at most: what the loss runs over"
        ),
        Figure("admission limit", config.admission_limit, "trajectories", "leased, or durable and not yet consumed"),
        Figure("expected lag", expected_lag(config), "updates", "mean over tokens while generation is the slow side"),
        Figure(
            "largest lag",
            largest_lag(config),
            "updates",
            "everything admitted is ahead of it; engines add their own delay",
        ),
        *_feedback(config),
        *_text(config),
        Figure(
            "worker's stop",
            stop_s(config),
            "seconds",
            "at most: rollout.drain_s and one call of ingest; the grace of its pod must be longer",
        ),
        Figure("payload", payload_bytes(config), "bytes", "of the longest trajectory"),
        Figure(
            "Redis memory",
            redis_bytes(config),
            "bytes",
            "admitted + waiting + unacknowledged + dead payloads, at most",
        ),
        Figure("policy parameters", count, "parameters", _count_rule(config)),
        Figure("trainer memory", trainer_bytes(config, count), "bytes", "per rank, without activations, at most"),
        Figure("engine memory", engine_bytes(config, count), "bytes", "weights of one engine, without its cache"),
        Figure("engine cache", cache_bytes(config), "bytes", "of one engine, for engine.max_total_tokens"),
    ]


def policy_parameters(config: RunConfig) -> int | None:
    """Parameters of the policy: counted in the checkpoint where it is at hand, else as the run file says."""
    return parameters(config.model) or config.hardware.parameters


def action_tokens(config: RunConfig) -> int:
    """The most action tokens one trajectory can have."""
    return min(config.rollout.max_turns * config.rollout.max_new_tokens, config.rollout.max_tokens)


def expected_lag(config: RunConfig) -> float:
    """Mean lag of a token in updates, for one worker whose generation is the slow side.

    While an episode runs, about as many others end as run beside it, so its oldest token is `concurrency` /
    `trajectories_per_update` updates old and the average one half of that; publishing less often adds its own half.
    """
    if config.algorithm.synchronous:
        return 0.0
    in_flight = min(config.rollout.concurrency, config.admission_limit)
    return in_flight / config.trainer.trajectories_per_update / 2 + (config.trainer.publish_every - 1) / 2


def largest_lag(config: RunConfig) -> int:
    """Lag of a trajectory before which everything else that is admitted is consumed, in updates.

    With the admission limit at its lower bound this is exactly max_lag.
    """
    ahead = (config.admission_limit - 1) // config.trainer.trajectories_per_update
    return ahead + config.trainer.publish_every - 1


def stop_s(config: RunConfig) -> float:
    """What a worker may take from SIGTERM to its end: whatever grace it is given must be longer."""
    return config.rollout.drain_s + 2 * config.redis.timeout_s


def payload_bytes(config: RunConfig) -> int:
    """Size of the longest trajectory on the wire, with its routed experts where they are replayed."""
    routing = expected_routing(config)
    per_token = BYTES_PER_TOKEN + (routing.row_bytes if routing is not None else 0)
    return config.rollout.max_tokens * per_token + BYTES_PER_TRAJECTORY


def archived_bytes(config: RunConfig) -> int:
    """Size of an update's file in the archive when every trajectory of it is the longest."""
    one = payload_bytes(config) + action_tokens(config) * ARCHIVED_BYTES_PER_TOKEN
    return config.trainer.trajectories_per_update * one


def redis_bytes(config: RunConfig) -> int:
    """The most that Redis holds in payloads; remembered ids (about 100 bytes each, seen_horizon_h long) come on top."""
    one = payload_bytes(config)
    per_update = config.trainer.trajectories_per_update * one
    unacknowledged = min(
        config.checkpoint.every_updates * per_update, config.checkpoint.unacked_mb_max * MIB + per_update
    )
    feedback = config.reward.feedback
    waiting = feedback.waiting_max * one if feedback is not None else 0
    return config.admission_limit * one + waiting + unacknowledged + config.redis.dead_letters_mb * MIB


def trainer_bytes(config: RunConfig, count: int | None) -> int | None:
    """Memory per rank for policy, critic (where there is one, counted as if all of it were trained) and reference."""
    if count is None:
        return None
    trainer = config.trainer
    weight = 2 if trainer.dtype == "bfloat16" else 4
    parts = {0: TRAINING_BYTES - 2 * weight, 1: weight, 2: weight}  # optimiser, gradients, weights
    # ZeRO stage s shards the first s of these.
    sharded = sum(size for part, size in parts.items() if part < trainer.zero_stage)
    whole = TRAINING_BYTES - sharded
    networks = (1 + config.algorithm.has_critic) * count * (whole + sharded / trainer.ranks)
    reference = 0.0
    if trainer.kl_coef > 0:
        reference = count * weight / (trainer.ranks if trainer.zero_stage == 3 else 1)
    return math.ceil(networks + reference)


def engine_bytes(config: RunConfig, count: int | None) -> int | None:
    """Memory for the weights in one engine."""
    return None if count is None else count * (2 if config.engine.dtype == "bfloat16" else 4)


def least_trainer_bytes(config: RunConfig, count: int) -> int:
    """Memory per rank without which nothing trains: the policy with its optimiser, the other networks' weights."""
    trainer = config.trainer
    weight = 2 if trainer.dtype == "bfloat16" else 4
    trained = 0 if trainer.frozen else TRAINING_BYTES  # which share is frozen only the model can say
    parts = {0: trained - 2 * weight, 1: weight, 2: weight} if trained else {2: weight}  # optimiser, gradients, weights
    policy = sum(size / (trainer.ranks if part < trainer.zero_stage else 1) for part, size in parts.items())
    others = config.algorithm.has_critic + (trainer.kl_coef > 0)
    return math.floor(count * (policy + others * weight / (trainer.ranks if trainer.zero_stage == 3 else 1)))


def cache_bytes(config: RunConfig) -> int | None:
    """Memory of one engine's cache, over all its GPUs; None when nobody says what a token takes."""
    per_token = config.hardware.cache_bytes_per_token
    if config.model.path is not None and (found := cache_values_per_token(config.model.path.expanduser())):
        per_token = found * (2 if config.engine.dtype == "bfloat16" else 4)
    return None if per_token is None else per_token * config.engine.max_total_tokens


def _count_rule(config: RunConfig) -> str:
    if parameters(config.model) is None and config.hardware.parameters is not None:
        return "hardware.parameters: the checkpoint is not on this machine"
    return "from the checkpoint's headers, or the tiny model's shape"


def _critic_first(config: RunConfig) -> list[Figure]:
    """How long the critic trains alone."""
    if not config.algorithm.has_critic:
        return []
    critic = config.critic
    gate = f"at most, until explained variance is {critic.pretrain_explained_variance:g}"
    return [
        Figure("critic pre-training", critic.pretrain_trajectories, "trajectories", gate),
        Figure("critic warm-up", critic.warmup_updates, "updates", "critic-only, then the policy moves"),
    ]


def _text(config: RunConfig) -> list[Figure]:
    """What an archive that forgets keeps all the same."""
    if config.retention.archive_h == "forever":
        return []
    rule = f"at most, that kept checkpoints may train again; the rest goes after {config.retention.archive_h:g} h"
    return [
        Figure("archived text", config.checkpoint.keep_last * config.checkpoint.every_updates, "updates", rule),
    ]


def _feedback(config: RunConfig) -> list[Figure]:
    """How long an answer is worth anything."""
    if config.reward.feedback is None:
        return []
    rule = "trainer.max_lag: what is answered later is stale; x seconds per update (sao report)"
    return [Figure("feedback in time", config.trainer.max_lag, "updates", rule)]


def _learning_rate_rule(config: RunConfig) -> str:
    trainer = config.trainer
    if trainer.lr != "auto":
        return "trainer.lr"
    product = f"{trainer.lr_per_trajectory:g} x {trainer.trajectories_per_update}"
    return f"auto: {product}, at most {trainer.lr_max:g}"
