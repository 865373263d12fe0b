"""Whether a run fits the GPUs that `[hardware]` says it has.

Refused is what cannot fit whatever else happens: more processes than GPUs, weights and optimiser states larger than the
memory. What only may not fit is doubted. Activations and CUDA's own share are in neither: leave them room.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator

from sao.config import derived
from sao.config.errors import ConfigError
from sao.config.schema import RunConfig

GIB = 2**30
MOST_RANKS = 2**16
"""More than anybody has."""


def refuse_what_cannot_fit(config: RunConfig) -> None:
    """ConfigError, with the numbers, when these GPUs cannot hold the run; also when they are too few."""
    for key, message in _impossible(config):
        raise ConfigError(key=key, message=message)


def verdict(config: RunConfig) -> str:
    """Whether the run fits, and on what, in one line; of a run that is not refused."""
    hardware, trainer = config.hardware, config.trainer
    count, memory = derived.policy_parameters(config), hardware.gpu_memory_gib
    if trainer.device == "cpu":
        return "trains on CPU, no GPU is compared"
    unknown = {
        "hardware.gpus": hardware.gpus is None,
        "hardware.gpu_memory_gib": memory is None,
        "hardware.parameters": count is None,
        "hardware.cache_bytes_per_token": derived.cache_bytes(config) is None,
    }
    if missing := [key for key, is_missing in unknown.items() if is_missing]:
        return f"whether it fits its GPUs is not known: set {', '.join(missing)}"
    engines = f"{hardware.engines} engine(s) of {hardware.engine_gpus}"
    on = f"{hardware.gpus} GPUs of {memory:g} GiB: {trainer.ranks} trainer rank(s), {engines}"
    if reasons := [key for key, _ in tight(config)]:
        return f"may not fit {on}; see the warning of {', '.join(reasons)}"
    most, engine = derived.trainer_bytes(config, count), derived.engine_bytes(config, count)
    cache = derived.cache_bytes(config)
    assert most is not None
    assert engine is not None
    assert cache is not None
    each = _gib((engine + cache) / hardware.engine_gpus)
    return f"fits {on}; at most {_gib(most)} GiB a rank without activations, {each} GiB of each engine's GPU"


def tight(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, reason) for what fits only if the estimate is generous."""
    memory, count = config.hardware.gpu_memory_gib, derived.policy_parameters(config)
    if memory is None or count is None:
        return
    most = derived.trainer_bytes(config, count)
    if config.trainer.device != "cpu" and most is not None and most > memory * GIB:
        reason = f"up to {_gib(most)} GiB per rank without activations, the GPU has {memory:g}"
        yield "trainer.ranks", f"{reason} (hardware.gpu_memory_gib)"
    weights, cache, gpus = derived.engine_bytes(config, count), derived.cache_bytes(config), config.hardware.engine_gpus
    room = config.hardware.engine_share * memory * gpus * GIB
    if weights is not None and cache is not None and weights + cache > room:
        taken = f"{_gib(weights)} GiB of weights and {_gib(cache)} GiB of cache"
        yield "engine.max_total_tokens", f"{taken}, {gpus} GPU(s) of {memory:g} GiB have room for {_gib(room)}"


def _impossible(config: RunConfig) -> Iterator[tuple[str, str]]:
    hardware, trainer = config.hardware, config.trainer
    if config.rollout.max_tokens > config.engine.max_total_tokens:
        longest = f"one trajectory of rollout.max_tokens {config.rollout.max_tokens}"
        yield "engine.max_total_tokens", f"{config.engine.max_total_tokens} tokens of cache do not hold {longest}"
    ranks = 0 if trainer.device == "cpu" else trainer.ranks
    engines = f"{hardware.engines} engine(s) of {hardware.engine_gpus} GPU(s)"
    wanted = ranks + hardware.engines * hardware.engine_gpus
    if hardware.gpus is not None and wanted > hardware.gpus:
        yield "hardware.gpus", f"{hardware.gpus}, but {ranks} trainer ranks and {engines} need {wanted}"
    count, memory = derived.policy_parameters(config), hardware.gpu_memory_gib
    if memory is None or count is None:
        return
    least = derived.least_trainer_bytes(config, count)
    if ranks and least > memory * GIB:
        need = f"{ranks} rank(s) at ZeRO stage {trainer.zero_stage} need at least {_gib(least)} GiB each"
        has = f"for {count:,} parameters, the GPU has {memory:g} (hardware.gpu_memory_gib)"
        yield "trainer.ranks", f"{need} {has}: {_cure(config, count, memory)}"
    weights = derived.engine_bytes(config, count)
    share = hardware.engine_share * memory
    if weights is not None and weights > hardware.engine_gpus * share * GIB:
        needed = math.ceil(weights / (share * GIB))
        holds = f"{share:g} GiB of each of {hardware.engine_gpus} GPU(s) do not hold {_gib(weights)} GiB of weights"
        yield "hardware.engine_gpus", f"{holds}: at least {needed}"


def _cure(config: RunConfig, count: int, memory: float) -> str:
    """The fewest ranks that would do at this stage, or that no number would."""

    def least(ranks: int) -> int:
        trainer = config.trainer.model_copy(update={"ranks": ranks})
        return derived.least_trainer_bytes(config.model_copy(update={"trainer": trainer}), count)

    if least(MOST_RANKS) > memory * GIB:
        return "no number of ranks is enough at this stage; trainer.zero_stage = 3 shards everything"
    fewest = bisect.bisect_left(range(MOST_RANKS), True, key=lambda ranks: least(ranks + 1) <= memory * GIB) + 1
    return f"at least {fewest} ranks, and more for activations"


def _gib(count: float) -> str:
    return f"{count / GIB:.1f}"
