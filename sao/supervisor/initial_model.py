"""The initial checkpoint: where it lies, and the job that makes it when it is not there yet.

Both are asked of the trainer's own modules in a process of their own: `sao` knows no service and imports no torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from sao.config import ConfigError
from sao.supervisor.process import Command, inherited_environment

_WHERE = """
import json, sys
from pathlib import Path
from sao.config import load_run_config
from services.trainer.warm_start_key import initial_model_path
path = initial_model_path(load_run_config(Path(sys.argv[1])))
json.dump({"path": str(path.absolute()), "there": (path / "config.json").is_file()}, sys.stdout)
"""


NO_TASK = "sao.tasks.TaskLoadError: "
"""How the last line of a traceback begins when `task.name` is what is wrong."""


class NoInitialModelError(RuntimeError):
    """The initial checkpoint can be neither found nor made."""


def locate(run_file: Path) -> tuple[Path, bool]:
    """The initial checkpoint's directory, and whether it is there; ConfigError when `task.name` leads to no task."""
    answer = subprocess.run(  # noqa: S603  # our own interpreter and program
        [sys.executable, "-c", _WHERE, str(run_file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=inherited_environment(),
    )
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        if reason.startswith(NO_TASK):
            raise ConfigError(key="task.name", message=reason.removeprefix(NO_TASK))
        msg = f"cannot tell where the initial model is: {reason}"
        raise NoInitialModelError(msg)
    found = json.loads(answer.stdout)
    return Path(found["path"]), bool(found["there"])


def warm_start_command(run_file: Path, log: Path) -> Command:
    """The job that makes the initial checkpoint, with its progress as JSON lines in the log."""
    argv = (sys.executable, "-m", "services.trainer.warm_start", "--config", str(run_file), "--progress-json")
    return Command("warm-start", argv, log, {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})


def progress(lines: list[str]) -> tuple[int, int, float] | None:
    """Step, steps and loss of the newest progress line."""
    for line in reversed(lines):
        if not line.startswith('{"step"'):
            continue
        try:
            values = json.loads(line)
            return int(values["step"]), int(values["steps"]), float(values["loss"])
        except (ValueError, KeyError):
            continue  # a line that is still being written
    return None
