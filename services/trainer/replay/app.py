"""`sao replay`: make archived updates again and compare them with what was logged.

| exit | because |
|---|---|
| 0 | every update asked for came out as it was logged |
| 1 | one did not: the first number that differs is named |
| 2 | it could not be done: a wrong argument, a damaged file, no such update; what can be replayed is named |
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from sao.archive import ArchiveError
from sao.config import ConfigError
from sao.rows import CRITIC_ONLY
from sao.tasks import TaskLoadError
from services.trainer.backends.base import BackendError
from services.trainer.replay.compare import Tolerance, compare
from services.trainer.replay.history import ArchivedRun, CannotReplayError, Stretch
from services.trainer.replay.reapply import reapplied
from services.trainer.replay.report import ReplayedUpdate, ReplayReport, show

REPRODUCED, DIVERGED, CANNOT = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status of the module's head."""
    parser = argparse.ArgumentParser(prog="sao replay", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("updates", type=int, nargs="*", metavar="UPDATE", help="0: those of the critic alone")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N more updates, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative; a tenth of it absolutely")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        run = ArchivedRun(arguments.run)
        wanted = sorted({*arguments.updates, *drawn(run, arguments.random, arguments.seed)})
        with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
            report = replay(run, wanted, Tolerance(arguments.tolerance, arguments.tolerance / 10), progress)
    except (CannotReplayError, ArchiveError, BackendError, ConfigError, TaskLoadError) as error:
        errors.print(f"cannot replay: {error}", markup=False)
        return CANNOT
    except Exception:  # noqa: BLE001 - the process's edge; the interpreter's own exit status would mean a divergence
        errors.print_exception()
        return CANNOT
    if arguments.json:
        sys.stdout.write(report.model_dump_json(indent=1) + "\n")
    else:
        show(report, Console(highlight=False, markup=False))
    return REPRODUCED if report.reproduced else DIVERGED


def drawn(run: ArchivedRun, count: int, seed: int) -> list[int]:
    """`count` of the policy updates that can be replayed, or all of them; CannotReplayError when there is none."""
    if count < 1:
        return []
    able = [update for update in run.replayable() if update > 0]
    if not able:
        msg = f"{run.folder} holds no update that can be replayed: its archive is empty or begins after every state"
        raise CannotReplayError(msg)
    return random.Random(seed).sample(able, min(count, len(able)))  # noqa: S311


def replay(run: ArchivedRun, wanted: Sequence[int], tolerance: Tolerance, progress: Progress) -> ReplayReport:
    """Replay in order until the first divergence; CannotReplayError when there is none, or one of them cannot be."""
    if not wanted:
        msg = f"no update asked for: name one, or --random N; those that can be replayed: {run.able}"
        raise CannotReplayError(msg)
    stretches = run.plan(wanted)
    bar = progress.add_task("re-applying", total=sum(len(stretch.steps) for stretch in stretches))
    made: list[ReplayedUpdate] = []
    for update in _replayed(run, stretches, set(wanted), tolerance):
        made.append(update)
        progress.advance(bar)
        if update.divergence is not None:
            break
    found = made[-1].divergence
    return ReplayReport(
        run=str(run.folder),
        relative=tolerance.relative,
        absolute=tolerance.absolute,
        wanted=list(wanted),
        updates=made,
        reproduced=found is None,
        divergence=found,
        not_reached=[update for update in wanted if found is not None and update > found.update],
    )


def _replayed(
    run: ArchivedRun, stretches: Sequence[Stretch], wanted: Collection[int], tolerance: Tolerance
) -> Iterator[ReplayedUpdate]:
    for stretch in stretches:
        for logged, replayed in reapplied(run, stretch):
            several_ranks = run.config(logged.trainer_epoch).trainer.ranks > 1
            quantities, divergence = compare(logged, replayed, tolerance, several_ranks=several_ranks)
            yield ReplayedUpdate(
                update=logged.update,
                critic_only=int(replayed.metrics[CRITIC_ONLY]),
                trainer_epoch=logged.trainer_epoch,
                origin=stretch.origin,
                wanted=logged.update in wanted,
                trajectories=len(logged.trajectories),
                action_tokens=sum(len(trained.ratios) for trained in replayed.trajectories),
                quantities=quantities,
                divergence=divergence,
            )
