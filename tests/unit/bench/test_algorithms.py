"""What `make prove-algorithms` and its slice say of a run that went wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from bench.algorithms import arguments, judge
from sao.archive import Archive
from sao.config import load_run_config
from sao.config.algorithms import ALGORITHMS, AlgorithmName
from sao.rows import UpdateRow
from sao.v1 import archive_pb2 as pb
from sao.v1 import trajectory_pb2
from tests.support.update_rows import trained_row, update_row

METRICS = {"update_skipped": 0.0, "policy_grad_norm": 0.5}


def run_of(folder: Path, algorithm: AlgorithmName) -> list[UpdateRow]:
    """Three sound updates of two trajectories, one of them lagging where it may."""
    lag = int(not ALGORITHMS[algorithm].synchronous)
    metrics = METRICS | ({"critic_loss": 0.1} if ALGORITHMS[algorithm].has_critic else {})
    return [
        update_row(number, [trained_row(2 * number + which, 1.0, lag=lag) for which in (0, 1)], metrics=metrics)
        for number in (1, 2, 3)
    ]


def left(folder: Path, rows: Sequence[UpdateRow], advantages: Sequence[float] = (0.5, -0.5)) -> None:
    """Write a run's folder; each update's trajectories are the two rollouts of a prompt."""
    (folder / "updates.jsonl").write_text("".join(f"{row.model_dump_json()}\n" for row in rows))
    (folder / "report.json").write_text(json.dumps({"restarts": {}}))
    archive = Archive(folder / "archive")
    for row in rows:
        members = [
            pb.TrainedTrajectory(trajectory=trajectory_pb2.Trajectory(ordinal=row.update), advantages=[value, value])
            for value in advantages
        ]
        archive.append(pb.ArchivedUpdate(update=row.update, trainer_epoch=1, trajectories=members))


def critic_missing(rows: list[UpdateRow]) -> None:
    del rows[0].metrics["critic_loss"]


def all_at_lag_0(rows: list[UpdateRow]) -> None:
    for row in rows:
        row.trajectories[:] = [one.model_copy(update={"lag": 0}) for one in row.trajectories]


def one_twice(rows: list[UpdateRow]) -> None:
    rows[2].trajectories[0] = rows[0].trajectories[0]


MISTAKES: dict[str, Callable[[list[UpdateRow]], None]] = {
    "missing or repeated": lambda rows: rows.__delitem__(1),
    "were skipped": lambda rows: rows[0].metrics.update(update_skipped=1.0),
    "no gradient norm": lambda rows: rows[0].metrics.__delitem__("policy_grad_norm"),
    "trained twice": one_twice,
    "a critic where": critic_missing,
    "nothing lagged": all_at_lag_0,
}


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_sound_run_has_no_problem(algorithm: AlgorithmName, tmp_path: Path) -> None:
    left(tmp_path, run_of(tmp_path, algorithm))
    assert judge(algorithm, tmp_path, 3)["problems"] == []


@pytest.mark.parametrize("said", MISTAKES)
def test_a_mistake_is_told(said: str, tmp_path: Path) -> None:
    rows = run_of(tmp_path, "sao")
    MISTAKES[said](rows)
    left(tmp_path, rows)
    (problem,) = judge("sao", tmp_path, 3)["problems"]
    assert said in problem


def test_lag_in_a_synchronous_run_is_told(tmp_path: Path) -> None:
    rows = run_of(tmp_path, "grpo_sync")
    rows[0].trajectories[0] = rows[0].trajectories[0].model_copy(update={"lag": 1})
    left(tmp_path, rows)
    (problem,) = judge("grpo_sync", tmp_path, 3)["problems"]
    assert "lag in a synchronous run" in problem


@pytest.mark.parametrize(("advantages", "said"), [((0.5,), "holds"), ((0.5, 0.5), "not each other's opposite")])
def test_a_broken_group_is_told(advantages: tuple[float, ...], said: str, tmp_path: Path) -> None:
    left(tmp_path, run_of(tmp_path, "grpo_async"), advantages)
    problems = judge("grpo_async", tmp_path, 3)["problems"]
    assert len(problems) == 3
    assert all(said in problem for problem in problems)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_algorithm_has_arguments_that_a_run_takes(algorithm: AlgorithmName) -> None:
    given = arguments(algorithm)
    sets = [text for flag, text in pairwise(given) if flag == "--set"]
    assert load_run_config(None, sets, env={}, preset="tiny").trainer.algorithm == algorithm
