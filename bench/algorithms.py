"""Train with one algorithm on the real stack, and judge what its run left."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from sao.archive import Archive
from sao.config.algorithms import ALGORITHMS, AlgorithmName
from sao.rows import UpdateRow, read_rows

UPDATES = 100
PER_UPDATE = {"grpo_sync": 2, "grpo_async": 2, "grpo_dis": 2, "spo": 2}
"""Trajectories per update where one is not enough; a group is then a pair."""


def arguments(algorithm: AlgorithmName, updates: int = UPDATES) -> list[str]:
    """Of `sao up`, for a run as small as the algorithm allows; the critic learns while the policy does."""
    sets = [
        f'trainer.algorithm="{algorithm}"',
        f"trainer.trajectories_per_update={PER_UPDATE.get(algorithm, 1)}",
        "critic.pretrain_trajectories=0",
        "critic.warmup_updates=2",
    ]
    if ALGORITHMS[algorithm].in_groups:
        sets += ["group.size=2", "group.timeout_s=20.0"]
    return ["--preset", "tiny", "--updates", str(updates), *(word for text in sets for word in ("--set", text))]


def judge(algorithm: AlgorithmName, folder: Path, updates: int = UPDATES) -> dict[str, Any]:
    """What a finished run shows, and under `problems` what it should not."""
    rows = [row for row, _ in read_rows(folder / "updates.jsonl")]
    policy = [row for row in rows if not row.critic_only]
    trained = [trajectory for row in rows for trajectory in row.trajectories]
    lags = Counter(trajectory.lag for trajectory in trained)
    twice = [name for name, times in Counter(trajectory.id for trajectory in trained).items() if times > 1]
    restarts = json.loads((folder / "report.json").read_text())["restarts"]
    kind = ALGORITHMS[algorithm]
    told = {
        "updates are missing or repeated": [row.update for row in policy] != list(range(1, updates + 1)),
        "updates were skipped": any(row.metrics["update_skipped"] for row in rows),
        "updates have no gradient norm": not all("policy_grad_norm" in row.metrics for row in policy),
        f"trained twice: {twice}": bool(twice),
        f"processes were started again: {restarts}": bool(restarts),
        "a critic where there is none, or none where there is one": not all(
            ("critic_loss" in row.metrics) == kind.has_critic for row in rows
        ),
        f"lag in a synchronous run: {dict(lags)}": kind.synchronous and set(lags) != {0},
        "nothing lagged in an asynchronous run": not kind.synchronous and max(lags) == 0,
    }
    problems = [what for what, holds in told.items() if holds]
    if kind.in_groups:
        problems += broken_groups(folder, policy)
    return {"updates": len(policy), "trajectories": len(trained), "max_lag": max(lags), "problems": problems}


def broken_groups(folder: Path, rows: list[UpdateRow]) -> list[str]:
    """Updates that were not made of both rollouts of a prompt, each compared with the other."""
    archive, found = Archive(folder / "archive"), []
    for row in rows:
        (archived,) = archive.read_steps(row.update)
        members = Counter(trained.trajectory.ordinal for trained in archived.trajectories)
        if set(members.values()) != {2}:
            found.append(f"update {row.update} holds {dict(members)}")
            continue
        values = [set(trained.advantages) for trained in archived.trajectories]
        if any(len(one) != 1 for one in values) or abs(sum(value for one in values for value in one)) > 1e-6:
            found.append(f"update {row.update}: advantages {values} are not each other's opposite")
    return found
