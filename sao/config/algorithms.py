"""The algorithms by name: where each takes its advantages from, what its loss is, and which settings go together.

Every one trains on the same trajectories from the same queue with the same optimiser; services/trainer/core has the
mathematics, docs/algorithm.md the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from sao.config.schema import RunConfig

AlgorithmName = Literal["sao", "grpo_sync", "grpo_async", "grpo_dis", "vapo", "reinforce_ma", "spo"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to turn rewards into gradients."""

    advantage: Literal["critic", "group", "moving_average", "tracker"]
    """`critic`: GAE that skips observations. The others subtract a baseline of rewards and need no critic."""
    loss: Literal["dis", "ppo"]
    """Direct double-sided importance sampling on the rollout's log-probs, or PPO's clip."""
    synchronous: bool = False
    """The next rollouts begin when every engine serves the weights that the last ones made."""

    @property
    def has_critic(self) -> bool:
        return self.advantage == "critic"

    @property
    def in_groups(self) -> bool:
        """Whether it wants several rollouts of each prompt."""
        return self.advantage == "group"


ALGORITHMS: dict[AlgorithmName, Algorithm] = {
    "sao": Algorithm("critic", "dis"),
    "grpo_sync": Algorithm("group", "ppo", synchronous=True),
    "grpo_async": Algorithm("group", "ppo"),
    "grpo_dis": Algorithm("group", "dis"),
    "vapo": Algorithm("critic", "ppo"),
    "reinforce_ma": Algorithm("moving_average", "dis"),
    "spo": Algorithm("tracker", "dis"),
}

ALGORITHM_DEFAULTS: dict[AlgorithmName, dict[str, dict[str, Any]]] = {
    "vapo": {"critic": {"updates_per_policy_update": 1, "frozen": []}},
}
"""Section -> key -> what an algorithm's authors use where the run file says nothing."""

_SECTIONS: dict[str, Callable[[Algorithm], bool]] = {
    "group": lambda it: it.in_groups,
    "ppo": lambda it: it.loss == "ppo",
    "moving_average": lambda it: it.advantage == "moving_average",
    "spo": lambda it: it.advantage == "tracker",
}
"""Which algorithms read a section of their own."""


def conflicts(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, reason) of every setting that the run's algorithm cannot follow."""
    name, algorithm = config.trainer.algorithm, config.algorithm
    per_update = config.trainer.trajectories_per_update
    for section, used_by in _SECTIONS.items():
        if not used_by(algorithm):
            takers = ", ".join(other for other, it in ALGORITHMS.items() if used_by(it))
            for key in _changed(config, section):
                yield f"{section}.{key}", f"{name} does not use it; it belongs to {takers}"
    if algorithm.in_groups and per_update % (size := config.group.size):
        reason = f"{per_update} is no multiple of group.size {size}: {name} trains whole groups; expected "
        yield "trainer.trajectories_per_update", reason + f"{-(-per_update // size) * size}, or another group.size"
    if algorithm.advantage in {"group", "tracker"} and config.trainer.advantage_norm == "whiten":
        yield "trainer.advantage_norm", f"{name} normalises its advantages itself: expected none"
    if algorithm.advantage == "tracker" and per_update < 2:
        reason = f"{name} normalises over the update: of one trajectory nothing would be left; expected at least 2"
        yield "trainer.trajectories_per_update", reason
    if algorithm.advantage == "moving_average" and config.trainer.advantage_norm == "whiten" and per_update < 2:
        reason = f"whiten leaves nothing of one trajectory, whose tokens {name} gives one advantage; expected none"
        yield "trainer.advantage_norm", reason
    if config.ppo.minibatches > 1 and per_update % (config.ppo.minibatches * config.trainer.ranks):
        parts = f"{config.ppo.minibatches} x trainer.ranks {config.trainer.ranks}"
        yield "ppo.minibatches", f"{parts} does not divide trainer.trajectories_per_update {per_update}"
    if algorithm.synchronous and config.trainer.publish_every != 1:
        reason = f"{config.trainer.publish_every}: {name} waits for the weights of every update; expected 1"
        yield "trainer.publish_every", reason
    if algorithm.synchronous and config.trainer.publish_min_seconds:
        reason = f"{config.trainer.publish_min_seconds}: {name} waits for the weights of every update; expected 0"
        yield "trainer.publish_min_seconds", reason
    if algorithm.synchronous and config.weights.mode == "in_place":
        reason = f"in_place: {name} samples each turn from one version, and this mixes two; expected retract or abort"
        yield "weights.mode", reason
    if config.spo.rho_min > config.spo.rho_max:
        yield "spo.rho_min", f"{config.spo.rho_min} is above spo.rho_max {config.spo.rho_max}"


def unused(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, reason) of settings that differ from their default and that the algorithm has no part for.

    A preset sets them for SAO, so that trying another algorithm on it must not be refused.
    """
    name, algorithm = config.trainer.algorithm, config.algorithm
    if not algorithm.has_critic:
        sections = {"critic": None, "trainer": ("gamma", "alpha", "lambda_critic"), "guards": ("explained_variance",)}
        for section, keys in sections.items():
            for key in _changed(config, section, keys):
                yield f"{section}.{key}", f"not used: {name} has no critic"
    if algorithm.loss != "dis":
        for key in _changed(config, "trainer", ("eps_low", "eps_high")):
            yield f"trainer.{key}", f"not used: {name} clips by [ppo]"


def _changed(config: RunConfig, section: str, keys: Iterable[str] | None = None) -> list[str]:
    """Those of a section's keys, all of them by default, that differ from their default."""
    values = getattr(config, section)
    fields = type(values).model_fields
    return [key for key in keys or fields if getattr(values, key) != fields[key].default]
