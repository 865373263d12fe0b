"""`sao replay`: the trainer's own program makes archived updates again; `sao` knows no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from sao.cli.runs import find_run

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a run file.")]
Updates = Annotated[list[int] | None, typer.Argument(metavar="UPDATE", help="Updates; 0: those of the critic alone.")]
Drawn = Annotated[int, typer.Option("--random", metavar="N", help="N more updates, drawn at random.")]
Seed = Annotated[int, typer.Option(help="Of the draw.")]
Relative = Annotated[float, typer.Option("--tolerance", help="Largest relative difference; a tenth of it absolutely.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def replay(  # noqa: PLR0917  # typer reads the signature
    run: Run,
    updates: Updates = None,
    drawn: Drawn = 0,
    seed: Seed = 0,
    tolerance: Relative = 1e-4,
    json: AsJson = False,
) -> NoReturn:
    """Make archived updates again on this machine's CPU and compare every number with what was logged.

    Begins at the nearest kept checkpoint before each and stops at the first divergence, which it names. Exit 0: all
    reproduced; 1: diverged; 2: cannot be replayed, with the updates that can.

    Examples: `sao replay runs/mine 120`, `sao replay runs/mine --random 20 --seed 1`.
    """
    from sao.supervisor.plan import THREADS
    from sao.supervisor.process import inherited_environment

    folder = find_run(run).root if run.is_file() else run
    argv = [sys.executable, "-m", "services.trainer.replay", str(folder), *map(str, updates or [])]
    argv += ["--random", str(drawn), "--seed", str(seed), "--tolerance", str(tolerance), *(["--json"] if json else [])]
    sys.stdout.flush()
    # In this process's place: output, signals and the exit status are then the program's own.
    os.execve(sys.executable, argv, inherited_environment() | THREADS)  # noqa: S606
