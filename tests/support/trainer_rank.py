"""One rank of tests/integration/test_trainer_ranks.py: rank 0 drives the updates, the other follows.

The last rank's policy gradient is not finite in update POISONED.

Run as `python -m tests.support.trainer_rank CHECKPOINT OUT ALGORITHM` under RANK and WORLD_SIZE.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sao.config import load_run_config
from sao.trajectory import Trajectory
from services.trainer.backends.deepspeed import DeepSpeedBackend
from services.trainer.core.update import TrajectoryTensors, Update, UpdateSettings
from services.trainer.launch import own_rank
from services.trainer.ranks import Ranks, follow
from tests.support.training import random_trajectory
from tests.support.zero_updates import random_routes

POISONED = 4


def tensors_of(rng: random.Random, reward: float, copies: int) -> TrajectoryTensors:
    trajectory = Trajectory(random_trajectory(rng, "unit"))
    mask = torch.tensor(trajectory.action_mask)
    draw = torch.Generator().manual_seed(rng.randrange(2**31))
    return TrajectoryTensors(
        torch.tensor(trajectory.token_ids),
        mask,
        torch.tensor(trajectory.logprobs),
        torch.zeros_like(mask).long(),
        reward,
        advantage=reward - 0.5,
        copies=copies,
        routes_TLK=random_routes(draw, len(mask) - 1),
    )


def poison(backend: DeepSpeedBackend, update: Update) -> None:
    """Make this rank's policy gradient infinite in update POISONED."""
    begin, backward, begun = update.begin, backend.policy_backward, count(1)
    number = 0

    def counted(*, critic_only: bool = False) -> None:
        nonlocal number
        number = next(begun)
        begin(critic_only=critic_only)

    def poisoned(loss_sum: Tensor) -> None:
        backward(loss_sum * (math.inf if number == POISONED else 1.0))

    update.begin = counted  # type: ignore[method-assign]
    backend.policy_backward = poisoned  # type: ignore[method-assign]


def main(checkpoint: Path, out: Path, algorithm: str, world_size: int) -> None:
    torch.set_num_threads(1)
    sets = [f"trainer.ranks={world_size}", "trainer.zero_stage=2", "trainer.device=cpu", "trainer.lr=1e-3"]
    sets += [f"trainer.algorithm={algorithm}", "critic.lr=1e-3", "trainer.routing_replay=true"]
    if algorithm != "sao":
        sets += ["group.size=2", "trainer.trajectories_per_update=4"]
    config = load_run_config(None, sets, env={})
    backend = DeepSpeedBackend(config, checkpoint)
    update = Update(backend, UpdateSettings.of(config))
    if own_rank() == world_size - 1:
        poison(backend, update)
    if own_rank() > 0:
        follow(backend, update)
    else:
        _drive(Ranks(backend, update), out)
    backend.close()


def _drive(ranks: Ranks, out: Path) -> None:
    rng = random.Random(3)
    values: list[list[float]] = []
    ratios: list[list[float]] = []
    for _ in range(2):
        ranks.begin(policy_lr=1e-3, critic_lr=1e-3, critic_only=False)
        trajectories = [tensors_of(rng, float(i % 2), copies=1 + i % 2) for i in range(3)]
        for start in range(0, 3, ranks.count):
            ranks.accumulate(trajectories[start : start + ranks.count])
        ranks.heartbeat()
        stats = ranks.finish()
        values += [t.advantages_A.tolist() for t in stats.trajectories]
        ratios += [t.ratios_A.tolist() for t in stats.trajectories]
    logprobs = ranks.logprobs([[1, 5, 6, 7, 20, 11]])
    directory = out.parent / f"state-{ranks.count}"
    directory.mkdir()
    ranks.save(directory)
    ranks.load(directory)
    again = ranks.logprobs([[1, 5, 6, 7, 20, 11]])
    checksum = policy_checksum(ranks)
    skipped = [repeated_update(ranks, reward) for reward in (math.inf, 1.0, 1.0)]
    ranks.stop()
    found = {"advantages": values, "ratios": ratios, "logprobs": logprobs, "again": again, "checksum": checksum}
    found |= {"skipped": skipped}
    out.write_text(json.dumps(found))


def policy_checksum(ranks: Ranks) -> float:
    return sum(float(t.double().abs().sum()) for t in ranks.policy_state().values())


def repeated_update(ranks: Ranks, last_reward: float) -> dict[str, Any]:
    """Always the same two trajectories, the second one (the last rank's) with this reward."""
    rng = random.Random(4)
    trajectories = [tensors_of(rng, reward, copies=1) for reward in (0.0, last_reward)]
    ranks.begin(policy_lr=1e-3, critic_lr=1e-3, critic_only=False)
    for start in range(0, 2, ranks.count):
        ranks.accumulate(trajectories[start : start + ranks.count])
    stats = ranks.finish()
    values = [t.values_A.tolist() for t in stats.trajectories]
    return {"reason": stats.skipped_reason, "values": values, "policy": policy_checksum(ranks)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(os.environ["WORLD_SIZE"]))
