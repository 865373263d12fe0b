"""A real SGLang server: started, killed, and started again where it was."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.support.processes import free_port, server

ENGINE_PYTHON = Path(__file__).resolve().parents[2] / ".venv-engine" / "bin" / "python"


class EngineServer:
    """One address, behind which a server with the same launch checkpoint runs, or none."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._checkpoint = checkpoint
        self._folder = folder
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._running = contextlib.ExitStack()

    @property
    def log(self) -> Path:
        """Of the newest start."""
        return self._folder / f"engine-{self._starts}.log"

    @property
    def runs(self) -> bool:
        """Whether there is a process, which may be stopped."""
        return self._process is not None

    def start(self) -> None:
        """Start it and wait until it answers (about 40 s)."""
        self._starts += 1
        command = [str(ENGINE_PYTHON), "-m", "sglang_cpuref.serve", "--model", str(self._checkpoint)]
        command += ["--port", str(self.port), "--", "--enable-return-routed-experts"]
        started = server(command, log=self.log, ready=self._answers, timeout_s=240)
        self._process = self._running.enter_context(started)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        if self._process is None:
            msg = f"the engine on port {self.port} does not run: start it before it is sent {number.name}"
            raise RuntimeError(msg)
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL to all of it."""
        self._process = None
        self._running.close()

    def load_launched(self) -> None:
        """Have it serve its launch checkpoint under its launch label, whatever a test has left there."""
        with httpx.Client(base_url=self.url, timeout=60) as http:
            http.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
            launched = {"model_path": str(self._checkpoint), "weight_version": "initial", "flush_cache": True}
            http.post("/update_weights_from_disk", json=launched).raise_for_status()
            http.post("/continue_generation", json={}).raise_for_status()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/model_info", timeout=2.0).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


@contextlib.contextmanager
def engine_server(checkpoint: Path, folder: Path) -> Iterator[EngineServer]:
    """A started one, killed when the block ends; its logs are in `folder`."""
    engine = EngineServer(checkpoint, folder)
    try:
        engine.start()
        yield engine
    finally:
        engine.kill()
