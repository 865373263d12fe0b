"""The run folder as the supervisor sees it: who runs it now, what was asked, and what happened when."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class RunIsRunningError(RuntimeError):
    """Another supervisor works in this folder."""


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TimelineEvent(_Line):
    """One line of timeline.jsonl."""

    at_s: float
    """Unix seconds."""
    event: str
    """up | warm_start | started | ready | restarted | ended | erased | stopped"""
    process: str = ""
    detail: str = ""


class ProcessState(_Line):
    """One process in processes.json."""

    name: str
    pid: int | None
    state: str
    address: str
    starts: int


class RunFolder:
    """Paths and small files of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked_file = root / "asked.toml"
        """The configuration as it was asked for, ports still open: what a resume starts from."""
        self.run_file = root / "run.toml"
        """The effective configuration that every process reads."""
        self.rows_file = root / "updates.jsonl"
        self.report_file = root / "report.json"
        self.curves_file = root / "curves.png"
        self.logs = root / "logs"
        self._timeline = root / "timeline.jsonl"
        self._processes = root / "processes.json"
        self._lock = root / "supervisor.lock"

    @property
    def holds_a_run(self) -> bool:
        """Whether `sao up` would resume."""
        return self.asked_file.exists()

    def log_file(self, name: str) -> Path:
        """Where a process's output goes."""
        return self.logs / f"{name}.log"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the one supervisor of this folder; RunIsRunningError names the other one's pid."""
        self.root.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                owner = file.read().strip() or "?"
                msg = f"{self.root} is being run by process {owner}; stop it, or name another --run-dir"
                raise RunIsRunningError(msg) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def running_pid(self) -> int | None:
        """The supervisor at work here, if any."""
        try:
            with self._lock.open(encoding="utf-8") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return int(file.read().strip() or 0) or None
        except FileNotFoundError:
            return None
        return None

    def note(self, event: str, process: str = "", detail: str = "") -> None:
        """Append to the timeline."""
        line = TimelineEvent(at_s=time.time(), event=event, process=process, detail=detail)
        with self._timeline.open("a", encoding="utf-8") as file:
            file.write(line.model_dump_json() + "\n")

    def timeline(self) -> list[TimelineEvent]:
        """Every event so far, a torn last line left out."""
        if not self._timeline.exists():
            return []
        lines = self._timeline.read_text(encoding="utf-8").splitlines(keepends=True)
        return [TimelineEvent.model_validate_json(line) for line in lines if line.endswith("\n")]

    def write_processes(self, states: Sequence[ProcessState]) -> None:
        """Replace processes.json in one step."""
        temporary = self._processes.with_suffix(".tmp")
        temporary.write_text(json.dumps([state.model_dump() for state in states], indent=1), encoding="utf-8")
        temporary.replace(self._processes)

    def processes(self) -> list[ProcessState]:
        """The processes as last written; empty before the first start."""
        if not self._processes.exists():
            return []
        return [ProcessState.model_validate(item) for item in json.loads(self._processes.read_text(encoding="utf-8"))]
