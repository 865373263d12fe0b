"""Every algorithm trains `calculator` with every real process, one hundred updates each, all on one SGLang server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sao.archive import Archive
from sao.config import load_run_config
from sao.config.algorithms import ALGORITHMS, AlgorithmName
from sao.rows import UpdateRow, read_rows
from sao.v1 import archive_pb2 as pb
from services.trainer.warm_start import warm_start
from services.trainer.warm_start_key import initial_model_path
from tests.conftest import ROOT
from tests.support.engine import ENGINE_PYTHON
from tests.support.processes import free_port, server

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(600)]

UPDATES = 100
PER_UPDATE = {"grpo_sync": 2, "grpo_async": 2, "grpo_dis": 2, "spo": 2}
"""Trajectories per update where one is not enough; a group is then a pair."""


def settings(algorithm: AlgorithmName) -> list[str]:
    """The `--set` arguments of a run as small as the algorithm allows."""
    sets = [f'trainer.algorithm="{algorithm}"', f"trainer.trajectories_per_update={PER_UPDATE.get(algorithm, 1)}"]
    if ALGORITHMS[algorithm].in_groups:
        sets += ["group.size=2", "group.timeout_s=20.0"]
    return sets


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One engine, started with the model that every run begins from."""
    config = load_run_config(None, env={}, preset="tiny")
    model = initial_model_path(config)
    if not (model / "config.json").exists():
        warm_start(config, model, lambda _step, _steps, _loss: None)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(ENGINE_PYTHON), "-m", "sglang_cpuref.serve", "--model", str(model), "--port", str(port)]

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/model_info", timeout=2.0).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    with server(command, log=tmp_path_factory.mktemp("engine") / "engine.log", ready=ready, timeout_s=240):
        yield url


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_trains_one_hundred_updates(algorithm: AlgorithmName, engine_url: str, tmp_path: Path) -> None:
    folder = tmp_path / algorithm
    sets = [
        *settings(algorithm),
        f'engine.urls=["{engine_url}"]',
        "critic.pretrain_trajectories=0",
        "critic.warmup_updates=2",
    ]
    command = [sys.executable, "-m", "sao.cli.main", "up", "--preset", "tiny", "--run-dir", str(folder)]
    command += ["--updates", str(UPDATES), *(word for text in sets for word in ("--set", text))]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    rows = [row for row, _ in read_rows(folder / "updates.jsonl")]
    policy = [row for row in rows if not row.critic_only]
    assert [row.update for row in policy] == list(range(1, UPDATES + 1))
    assert not any(row.metrics["update_skipped"] for row in rows)
    assert all("policy_grad_norm" in row.metrics for row in policy)
    ids = [trained.id for row in rows for trained in row.trajectories]
    assert len(ids) == len(set(ids)), "a trajectory was trained twice"
    assert json.loads((folder / "report.json").read_text())["restarts"] == {}

    has_critic = ALGORITHMS[algorithm].has_critic
    assert all(("critic_loss" in row.metrics) == has_critic for row in rows)
    if ALGORITHMS[algorithm].in_groups:
        assert_groups_are_whole(folder, policy)
    if ALGORITHMS[algorithm].synchronous:
        assert {trained.lag for row in rows for trained in row.trajectories} == {0}
    else:
        assert max(trained.lag for row in rows for trained in row.trajectories) > 0


def assert_groups_are_whole(folder: Path, rows: list[UpdateRow]) -> None:
    """Every update was made of both rollouts of a prompt, compared with each other."""
    archive = Archive(folder / "archive")
    for row in rows:
        (archived,) = archive.read_steps(row.update)
        members = Counter(trained.trajectory.ordinal for trained in archived.trajectories)
        assert set(members.values()) == {2}, f"update {row.update} holds {members}"
        first, second = (advantage_of(trained) for trained in archived.trajectories)
        assert first == pytest.approx(-second)


def advantage_of(trained: pb.TrainedTrajectory) -> float:
    """The one advantage on all of its action tokens."""
    (advantage,) = set(trained.advantages)
    return float(advantage)
