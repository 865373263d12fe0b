"""What an update leaves behind: its archive entry and its line in `updates.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sao.atomic import append_line
from sao.preference import Preference
from sao.rows import TrainedRow, UpdateRow
from sao.v1 import archive_pb2 as pb
from services.trainer import metrics
from services.trainer.consumer import Taken
from services.trainer.core.update import TrajectoryStats, UpdateStats


@dataclass(frozen=True)
class FinishedUpdate:
    """One update as it happened."""

    run: str
    epoch: int
    update: int
    """Policy updates made after it."""
    version_before: str
    preference: Preference | None
    """That its rewards are under."""
    policy_lr: float
    critic_lr: float
    taken: Sequence[Taken]
    stats: UpdateStats
    numbers: dict[str, float]
    """Every metric of the update; undefined ones absent."""
    finished_s: float
    phase: str
    held: list[str]

    @property
    def preference_version(self) -> int:
        """0 when none was pinned."""
        return self.preference.version if self.preference is not None else 0

    def archived(self) -> pb.ArchivedUpdate:
        """The message that replay, viewers and recovery read."""
        pairs = zip(self.taken, self.stats.trajectories, strict=True)
        return pb.ArchivedUpdate(
            run=self.run,
            update=self.update,
            trainer_epoch=self.epoch,
            version_before=self.version_before,
            preference_version=self.preference_version,
            trajectories=[_archived_trajectory(taken, stats) for taken, stats in pairs],
            metrics=self.numbers,
            finished_s=self.finished_s,
            critic_only=self.stats.critic_only,
            skipped=self.stats.skipped,
            skipped_reason=self.stats.skipped_reason,
            policy_lr=self.policy_lr,
            critic_lr=self.critic_lr,
            preference_json=self.preference.document.model_dump_json() if self.preference is not None else "",
        )

    def row(self, version: str, dropped: dict[str, int]) -> UpdateRow:
        """The line that the live view and the report read."""
        return UpdateRow(
            update=self.update,
            critic_only=self.stats.critic_only,
            phase=self.phase,
            held=self.held,
            version=version,
            trainer_epoch=self.epoch,
            preference_version=self.preference_version,
            finished_s=self.finished_s,
            trajectories=[_row(taken) for taken in self.taken],
            dropped=dropped,
            metrics=self.numbers,
        )


def summary(taken: Sequence[Taken]) -> dict[str, float]:
    """Numbers of an update's trajectories that the algorithm does not know, or on several ranks only of its share."""
    versions = [len({name for name in t.trajectory.versions if name}) for t in taken]
    lag_N = torch.cat([t.tensors.lag_T[t.tensors.action_mask_T] for t in taken])
    n = len(taken)
    return {
        "trajectories": float(n),
        "action_tokens": float(lag_N.numel()),
        "reward_mean": sum(t.reward for t in taken) / n,
        "lag_mean": float(lag_N.double().mean()),
        "lag_max": float(lag_N.max()),
        "versions_mean": sum(versions) / n,
        "versions_max": float(max(versions)),
        "tokens_mean": sum(len(t.trajectory.token_ids) for t in taken) / n,
        "action_tokens_mean": sum(t.trajectory.action_count for t in taken) / n,
        "turns_mean": sum(t.trajectory.turns for t in taken) / n,
        "truncated_fraction": sum(metrics.is_truncated(t.trajectory) for t in taken) / n,
    }


def finite(numbers: dict[str, float]) -> dict[str, float]:
    """The numbers that JSON can hold."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def append_row(path: Path, row: UpdateRow) -> None:
    """Add the line of one update."""
    append_line(path, row.model_dump_json().encode())


def _row(taken: Taken) -> TrainedRow:
    trajectory, outcome = taken.trajectory, taken.outcome
    return TrainedRow(
        id=trajectory.id,
        ordinal=trajectory.message.ordinal,
        reward=taken.reward,
        scored_under=outcome.scored_under,
        trained_under=taken.trained_under,
        scoring_started_s=outcome.scoring_started_s,
        consumed_s=taken.consumed_s,
        lag=taken.lag,
        versions=len({name for name in trajectory.versions if name}),
        tokens=len(trajectory.token_ids),
        action_tokens=trajectory.action_count,
        turns=trajectory.turns,
        finish_reason=metrics.finish_name(trajectory),
        components=dict(outcome.components),
    )


def _archived_trajectory(taken: Taken, stats: TrajectoryStats) -> pb.TrainedTrajectory:
    routes_TLK = taken.tensors.routes_TLK
    return pb.TrainedTrajectory(
        trajectory=taken.trajectory.message,
        outcome_json=taken.outcome.model_dump_json(),
        reward=taken.reward,
        values=stats.values_A.tolist(),
        advantages=stats.advantages_A.tolist(),
        ratios=stats.ratios_A.tolist(),
        weights=stats.weights_A.tolist(),
        lag=taken.lag,
        version_lags=taken.version_lags,
        copies=taken.tensors.copies,
        trained_under=taken.trained_under,
        routed_experts=b"" if routes_TLK is None else routes_TLK.numpy().tobytes(),
    )
