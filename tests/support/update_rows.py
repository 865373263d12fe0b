"""Builders of `updates.jsonl` rows."""

from __future__ import annotations

from collections.abc import Sequence

from sao.rows import TrainedRow, UpdateRow


def trained_row(
    number: int,
    reward: float,
    *,
    id_: str | None = None,
    scored_under: int = 1,
    lag: int = 0,
    consumed_s: float | None = None,
) -> TrainedRow:
    """Trajectory `number`, consumed at second 1000 + number."""
    return TrainedRow(
        id=id_ or f"trajectory-{number}",
        ordinal=number,
        reward=reward,
        scored_under=scored_under,
        trained_under=scored_under,
        scoring_started_s=999.0 + number,
        consumed_s=1000.0 + number if consumed_s is None else consumed_s,
        lag=lag,
        versions=1,
        tokens=20,
        action_tokens=12,
        turns=2,
        finish_reason="stop",
    )


def update_row(
    update: int,
    trajectories: Sequence[TrainedRow],
    *,
    epoch: int = 1,
    critic_only: bool = False,
    dropped: dict[str, int] | None = None,
    metrics: dict[str, float] | None = None,
) -> UpdateRow:
    """One update that ended half a second after its last trajectory was consumed."""
    return UpdateRow(
        update=update,
        critic_only=critic_only,
        version=f"v{update:08d}",
        trainer_epoch=epoch,
        preference_version=max((trajectory.trained_under for trajectory in trajectories), default=1),
        finished_s=max((trajectory.consumed_s for trajectory in trajectories), default=1000.0) + 0.5,
        trajectories=list(trajectories),
        dropped=dropped or {},
        metrics=metrics or {},
    )


def rows_of(rewards: Sequence[float], per_update: int = 4) -> list[UpdateRow]:
    """Updates of `per_update` trajectories with these rewards, the last one perhaps smaller."""
    numbered = [trained_row(number, reward) for number, reward in enumerate(rewards, start=1)]
    groups = [numbered[start : start + per_update] for start in range(0, len(numbered), per_update)]
    return [update_row(update, group) for update, group in enumerate(groups, start=1)]
