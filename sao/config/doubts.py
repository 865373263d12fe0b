"""Settings that are each allowed and together ask for trouble; nothing here stops a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sao.config import derived, fits
from sao.config.algorithms import unused
from sao.config.model_size import parameters
from sao.config.schema import UP_GRACE_S, RunConfig

ARCHIVE_LIMIT = 2**31
"""Bytes of one message, which protobuf does not write."""
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class Doubt:
    """One doubt: the key to change first, and the reason."""

    key: str
    text: str


def doubts(config: RunConfig) -> list[Doubt]:
    """Every doubt about this configuration."""
    return [
        *_staleness(config),
        *_learning(config),
        *_limits(config),
        *_memory(config),
        *_time(config),
        *_exposure(config),
    ]


def _staleness(config: RunConfig) -> Iterator[Doubt]:
    trainer = config.trainer
    if trainer.max_lag > 8:
        yield Doubt("trainer.max_lag", f"{trainer.max_lag} updates is far off-policy; above 8 learning may collapse")
    largest = derived.largest_lag(config)
    if largest > trainer.max_lag:
        lost = "masked" if trainer.stale_policy == "mask_tokens" else "dropped"
        yield Doubt(
            "rollout.concurrency",
            f"work may be {largest} updates old, above trainer.max_lag {trainer.max_lag}: the excess is {lost}",
        )
    if config.admission_limit < config.rollout.concurrency:
        yield Doubt(
            "rollout.concurrency",
            f"{config.rollout.concurrency} episodes, {config.admission_limit} are admitted at a time: engines idle",
        )


def _learning(config: RunConfig) -> Iterator[Doubt]:
    trainer, engine = config.trainer, config.engine
    for key, reason in unused(config):
        yield Doubt(key, reason)
    if config.model.path is None and trainer.kl_coef == 0:
        yield Doubt("trainer.kl_coef", "0: the tiny model collapses under lag without a little KL; 0.02 held it")
    most, window = config.critic.pretrain_trajectories, config.critic.explained_variance_window * trainer.ranks
    if config.algorithm.has_critic and 0 < most < window:
        reason = f"{most} never fill the windows of {trainer.ranks} ranks ({window}): the gate cannot be passed"
        yield Doubt("critic.pretrain_trajectories", reason)
    if config.run.updates is not None and config.run.updates < config.guards.window:
        reason = f"{config.guards.window} is more than run.updates {config.run.updates}: no guard ever judges"
        yield Doubt("guards.window", reason)
    if trainer.dtype not in {"auto", engine.dtype}:
        yield Doubt(
            "engine.dtype",
            f"{engine.dtype} in the engine, {trainer.dtype} in the trainer: ratios stray from 1 at lag 0",
        )
    if engine.dtype == "bfloat16" and config.weights.canary_tolerance < 1e-2:
        tolerance = config.weights.canary_tolerance
        yield Doubt("weights.canary_tolerance", f"{tolerance:g} is for float32; a bfloat16 engine will fail its canary")
    if config.model.path is not None and derived.policy_parameters(config) is None:
        yield Doubt("model.path", f"no safetensors files at {config.model.path} on this machine; sizes are unknown")


def _limits(config: RunConfig) -> Iterator[Doubt]:
    rollout, ingest, engine = config.rollout, config.ingest, config.engine
    if rollout.max_tokens > ingest.max_tokens:
        yield Doubt(
            "ingest.max_tokens", f"{ingest.max_tokens} refuses what rollout.max_tokens {rollout.max_tokens} allows"
        )
    if derived.payload_bytes(config) > ingest.max_message_mb * derived.MIB:
        yield Doubt("ingest.max_message_mb", f"{ingest.max_message_mb} MiB is less than the longest trajectory")
    update = derived.archived_bytes(config)
    if update >= ARCHIVE_LIMIT:
        yield Doubt(
            "trainer.trajectories_per_update",
            f"an update of the longest trajectories takes {update / 2**30:.1f} GiB in the archive, whose files hold at "
            "most 2: the trainer would end at it, and again at each start",
        )
    mark = config.redis.maxmemory_mb * derived.MIB * config.redis.back_pressure_at
    if (need := derived.redis_bytes(config)) > mark:
        yield Doubt(
            "redis.maxmemory_mb",
            f"up to {need / derived.MIB:.0f} MiB of payloads, back-pressure begins at {mark / derived.MIB:.0f} MiB",
        )
    per_engine = -(-rollout.concurrency // max(len(engine.urls), engine.count))
    if per_engine > engine.max_running_requests:
        yield Doubt(
            "engine.max_running_requests",
            f"{engine.max_running_requests} is less than the {per_engine} episodes per engine",
        )
    if per_engine * rollout.max_tokens > engine.max_total_tokens:
        yield Doubt(
            "engine.max_total_tokens",
            f"{engine.max_total_tokens} may not hold {per_engine} episodes of {rollout.max_tokens} tokens at once",
        )


def _memory(config: RunConfig) -> Iterator[Doubt]:
    found, said = parameters(config.model), config.hardware.parameters
    if found is not None and said is not None and found != said:
        yield Doubt("hardware.parameters", f"{said:,}, but the model here has {found:,}, which is what counts")
    for key, reason in fits.tight(config):
        yield Doubt(key, reason)


def _time(config: RunConfig) -> Iterator[Doubt]:
    longest = config.rollout.max_turns * config.rollout.turn_timeout_s
    if longest > config.ingest.episode_deadline_s:
        yield Doubt(
            "ingest.episode_deadline_s",
            f"{config.ingest.episode_deadline_s:g} s ends episodes whose turns may take {longest:g} s together",
        )
    drain, deadline = config.rollout.drain_s, config.ingest.episode_deadline_s
    if drain > deadline:
        yield Doubt(
            "rollout.drain_s", f"{drain:g} s, but no lease lasts longer than ingest.episode_deadline_s {deadline:g} s"
        )
    if config.redis.embedded and drain >= UP_GRACE_S:
        yield Doubt("rollout.drain_s", f"{drain:g} s, but `sao up` kills what is there {UP_GRACE_S:g} s after Ctrl-C")
    if config.algorithm.in_groups and config.group.timeout_s < min(longest, config.ingest.episode_deadline_s):
        yield Doubt(
            "group.timeout_s",
            f"{config.group.timeout_s:g} s closes groups whose episodes may take {longest:g} s: members are lost",
        )
    feedback = config.reward.feedback
    if feedback is not None and config.algorithm.in_groups and config.group.timeout_s < feedback.deadline_s:
        yield Doubt(
            "reward.feedback.deadline_s",
            f"{feedback.deadline_s:g} s, and group.timeout_s {config.group.timeout_s:g} s closes a group without what "
            "still waits: its answer comes to nothing",
        )
    if config.reward.claim_idle_s <= config.reward.component_timeout_s:
        yield Doubt("reward.claim_idle_s", "not above component_timeout_s: work is taken over while it is being scored")
    for name, scorer in config.reward.scorers.items():
        if config.reward.claim_idle_s <= 2 * scorer.deadline_s:  # one for its turn, one for a place among those at work
            yield Doubt(
                "reward.claim_idle_s", f"not above twice reward.scorers.{name}.deadline_s: work may be taken over"
            )


def _exposure(config: RunConfig) -> Iterator[Doubt]:
    if config.auth.token is None:
        for section in ("ingest", "reward", "weights"):
            bind = getattr(config, section).bind
            if bind not in LOOPBACK:
                yield Doubt("auth.token", f"none, and {section}.bind is {bind}: whoever reaches the port may use it")
