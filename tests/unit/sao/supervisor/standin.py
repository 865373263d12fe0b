"""A program that runs the real `sao up` loop over stand-in children: `python -m ... FOLDER MARK BEHAVIOUR`.

Valkey is the real one. The stand-ins carry MARK in their command line, so that a test can look for them from outside.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

from sao.config import RunConfig, load_run_config
from sao.supervisor import initial_model, up
from sao.supervisor.plan import Service, plan
from sao.supervisor.process import Command
from sao.supervisor.views import PlainLines

IGNORE_TERM = "import signal, pathlib, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
READY = "pathlib.Path(sys.argv[2]).touch(); "
WITH_GRANDCHILD = (
    IGNORE_TERM
    + f"""subprocess.Popen([sys.executable, "-c", {IGNORE_TERM + "signal.pause()"!r}, *sys.argv[1:]]); """
    + READY
    + "signal.pause()"
)
OBEDIENT = "import signal, pathlib, sys; " + READY + "signal.pause()"
FAILS = "import sys; sys.exit('no licence to serve')"
WRONG_SETTING = "import pathlib, sys; " + READY + "sys.stderr.write('rollout.concurrency: wrong'); sys.exit(2)"
CRASHES_ALWAYS = (
    "import os, pathlib, sys, time; "
    + READY
    + "end = time.monotonic() + 1\nwhile time.monotonic() < end: time.sleep(0.05)\nos._exit(9)"
)
TRAINS = (
    "import pathlib, sys, time; "
    + READY
    + "end = time.monotonic() + 30\n"
    + "while time.monotonic() < end and not pathlib.Path(sys.argv[3]).exists(): time.sleep(0.05)"
)
"""Ends with 0 when the file in its third argument appears."""

BEHAVIOURS = {
    "stubborn": {"engine-0": WITH_GRANDCHILD, "worker": OBEDIENT},
    "failing": {"engine-0": WITH_GRANDCHILD, "worker": FAILS},
    "wrong-setting": {"engine-0": OBEDIENT, "worker": WRONG_SETTING},
    "crashing-always": {"engine-0": WITH_GRANDCHILD, "worker": CRASHES_ALWAYS},
    "training": {"engine-0": WITH_GRANDCHILD, "worker": OBEDIENT, "trainer": TRAINS},
}


def stand_ins(folder: Path, mark: str, behaviour: str) -> list[Service]:
    """The stand-in services of a behaviour; each is ready when its file appears."""
    result = []
    for name, program in BEHAVIOURS[behaviour].items():
        ready = folder / f"{name}.ready"
        argv = (sys.executable, "-c", program, mark, str(ready), str(folder / "finish"))
        command = Command(name, argv, folder / "logs" / f"{name}.log")
        result.append(
            Service(
                name=name,
                command=lambda _start, command=command: command,  # type: ignore[misc]
                ready=ready.exists,
                after=frozenset({"valkey"}),
                address="nowhere",
                health=None,
                ends_run=name == "trainer",
            )
        )
    return result


def main(folder: Path, mark: str, behaviour: str) -> int:
    """Run it; the exit status of `sao up`."""

    def planned(
        config: RunConfig, run_file: Path, model: Path, *, own_engines: bool, earlier_starts: int
    ) -> list[Service]:
        real = plan(config, run_file, model, own_engines=own_engines, earlier_starts=earlier_starts)
        return [one for one in real if one.name == "valkey"] + stand_ins(folder, mark, behaviour)

    with patch.object(up, "plan", planned), patch.object(initial_model, "locate", lambda _run_file: (Path(), True)):
        sets = [f'run.dir="{folder}"', "redis.embedded=true", 'engine.urls=["http://127.0.0.1:1"]']
        return up.up(load_run_config(None, sets, env={}), PlainLines())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
