"""One run with every real process: Valkey, SGLang, ingest, worker, reward, DeepSpeed trainer, weight sync.

Everything is asserted on one run, because starting it is what costs.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sao.archive import Archive
from sao.config import load_run_config
from sao.rows import read_rows
from sao.trajectory import Trajectory
from tests.conftest import ROOT
from tests.support.engine import ENGINE_PYTHON
from tests.support.engine_logprobs import engine_logprobs, held_out_sequences, transformers_logprobs
from tests.support.processes import free_port, server, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(900)]
UPDATES = 120


@dataclass(frozen=True)
class FinishedRun:
    folder: Path
    output: str
    metrics: dict[str, str]
    """Exposition text by service, scraped while it trained."""

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return report


def processes_of(folder: Path) -> list[str]:
    """Command lines of live processes that name the run folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(folder) in line and "pytest" not in line:
            found.append(line)
    return found


def events(run: FinishedRun, process: str, event: str) -> list[dict[str, Any]]:
    """The structured log lines of one kind that a process wrote."""
    lines = (run.folder / "logs" / f"{process}.log").read_text().splitlines()
    parsed = [json.loads(line) for line in lines if line.startswith("{")]
    return [line for line in parsed if line.get("event") == event]


def scrape(folder: Path) -> dict[str, str]:
    """`/metrics` of every process of ours."""
    config = load_run_config(folder / "run.toml", env={})
    ports = {
        "ingest": config.ingest.metrics_port,
        "rollout": config.rollout.metrics_port,
        "reward": config.reward.port,
        "trainer": config.trainer.metrics_port,
        "weights": config.weights.port,
    }
    texts = {}
    for name, port in ports.items():
        assert httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=10).status_code == httpx.codes.OK, name
        assert httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=10).status_code == httpx.codes.OK, name
        texts[name] = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    return texts


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FinishedRun]:
    if not ENGINE_PYTHON.exists():
        pytest.skip("the engine environment is missing: run `make setup`")
    folder = tmp_path_factory.mktemp("e2e") / "run"
    log = folder.parent / "up.log"
    command = [sys.executable, "-m", "sao.cli.main", "up", "--preset", "tiny", "--seed", "0"]
    command += ["--updates", str(UPDATES), "--run-dir", str(folder)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:

        def trained() -> bool:
            assert process.poll() is None, f"sao up ended early with {process.returncode}:\n{log.read_text()[-4000:]}"
            return sum(row.update > 0 for row, _ in read_rows(folder / "updates.jsonl")) >= 3

        wait_until(trained, timeout_s=420, what="three policy updates", poll_s=0.5)
        metrics = scrape(folder)
        assert process.wait(timeout=420) == 0, log.read_text()[-4000:]
        yield FinishedRun(folder, log.read_text(), metrics)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)


def test_reward_rises(finished_run: FinishedRun) -> None:
    curve = finished_run.report["reward_curve"]
    assert curve[0]["trajectory"] == 100
    assert curve[-1]["moving_average"] - curve[0]["moving_average"] >= 0.35


def test_every_update_was_counted_and_published(finished_run: FinishedRun) -> None:
    report = finished_run.report
    rows = [row for row, _ in read_rows(finished_run.folder / "updates.jsonl")]
    assert report["updates"] == UPDATES
    assert [row.update for row in rows if not row.critic_only] == list(range(1, UPDATES + 1))
    ids = [trained.id for row in rows for trained in row.trajectories]
    assert len(ids) == len(set(ids)), "a trajectory was trained twice"
    assert report["trajectories"] == len(ids)


def test_trainer_and_engine_agree_about_the_same_weights(finished_run: FinishedRun) -> None:
    rows = [row for row, _ in read_rows(finished_run.folder / "updates.jsonl")]
    mismatch = [row.metrics["kl_rollout.lag_0"] for row in rows if "kl_rollout.lag_0" in row.metrics]
    assert mismatch, "no token at lag 0 in the whole run"
    assert max(mismatch) < 1e-6


def test_no_stale_token_ever_carried_weight(finished_run: FinishedRun) -> None:
    max_lag = load_run_config(finished_run.folder / "run.toml", env={}).trainer.max_lag
    update_of = {event["version"]: event["update"] for event in events(finished_run, "trainer", "version published")}
    archive = Archive(finished_run.folder / "archive")
    checked = 0
    for number in archive.updates():
        for archived in archive.read_steps(number):
            trainer_at = max(number - 1, 0)
            for trained in archived.trajectories:
                versions = [version for version in Trajectory(trained.trajectory).versions if version]
                for version, weight in zip(versions, trained.weights, strict=True):
                    checked += 1
                    assert weight == 0.0 or trainer_at - update_of[version] <= max_lag
    assert checked > UPDATES


def test_every_documented_metric_is_exposed(finished_run: FinishedRun) -> None:
    documented = re.findall(
        r"^\| `(sao_([a-z]+)_[a-z0-9_]+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE
    )
    assert len(documented) > 30
    missing = [
        (name, process)
        for name, service in documented
        for process in (finished_run.metrics if service == "process" else [service])
        if f"# TYPE {name}" not in finished_run.metrics[process]
    ]
    assert not missing


def test_the_last_version_is_the_same_model_in_transformers_and_in_a_fresh_engine(finished_run: FinishedRun) -> None:
    version = max(path for path in (finished_run.folder / "versions").glob("v*") if (path / "manifest.json").exists())
    sequences = held_out_sequences(version, count=20)
    expected = transformers_logprobs(version, sequences)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(ENGINE_PYTHON), "-m", "sglang_cpuref.serve", "--model", str(version), "--port", str(port)]

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/model_info", timeout=2.0).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    with server(command, log=finished_run.folder / "fresh-engine.log", ready=ready, timeout_s=240):
        found = engine_logprobs(url, sequences)
    worst = max(abs(a - b) for e, f in zip(expected, found, strict=True) for a, b in zip(e, f, strict=True))
    assert worst <= 1e-4


def sao_replay(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "sao.cli.main", "replay", str(folder), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout if done.returncode < 2 else done.stderr


def test_replay_reproduces_random_updates_and_finds_a_planted_divergence(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    """DeepSpeed and the real engine made them; plain torch makes them again."""
    status, output = sao_replay(finished_run.folder, "--random", "20", "--seed", "0", "--json")
    assert status == 0, output[-4000:]
    report = json.loads(output)
    assert len(report["wanted"]) == 20
    assert not [row for update in report["updates"] for row in update["quantities"] if row["differing"]]

    copy = tmp_path / "copy"
    shutil.copytree(finished_run.folder, copy, ignore=shutil.ignore_patterns("versions", "valkey", "logs"))
    archive = Archive(copy / "archive")
    planted = archive.read(UPDATES)
    planted.trajectories[1].values[2] += 0.01
    (copy / "archive" / archive.steps()[-1].file_name).write_bytes(planted.SerializeToString())
    status, output = sao_replay(copy, str(UPDATES))
    assert status == 1, output[-4000:]
    where = f"update {UPDATES}: trajectory {planted.trajectories[1].trajectory.id}, values"
    assert f"diverged first at {where}" in output


def test_plain_output_shows_the_way(finished_run: FinishedRun) -> None:
    assert "curl" in finished_run.output
    assert "/v1/preferences" in finished_run.output
    assert "report.json" in finished_run.output
    assert (finished_run.folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_left_running(finished_run: FinishedRun) -> None:
    assert processes_of(finished_run.folder) == []
