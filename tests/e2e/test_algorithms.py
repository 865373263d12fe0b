"""Every algorithm trains `calculator` with every real process, all on one SGLang server.

A slice of `make prove-algorithms`, which trains each four times as long and on an engine of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.algorithms import arguments, judge
from sao.config import load_run_config
from sao.config.algorithms import ALGORITHMS, AlgorithmName
from services.trainer.warm_start import warm_start
from services.trainer.warm_start_key import initial_model_path
from tests.conftest import ROOT
from tests.support.engine import ENGINE_PYTHON
from tests.support.processes import free_port, server

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(600)]

UPDATES = 25


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
def test_it_trains(algorithm: AlgorithmName, engine_url: str, tmp_path: Path) -> None:
    folder = tmp_path / algorithm
    command = [sys.executable, "-m", "sao.cli.main", "up", "--run-dir", str(folder), *arguments(algorithm, UPDATES)]
    done = subprocess.run(
        [*command, "--set", f'engine.urls=["{engine_url}"]'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert judge(algorithm, folder, UPDATES)["problems"] == []
