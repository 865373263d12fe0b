"""`sao status` and `sao report`: look at a run folder from outside."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from sao.cli.runs import Run, find_run, names_a_file
from sao.config import load_run_config
from sao.report import Report, adaptation_lines, write_report
from sao.supervisor.board_view import BoardView
from sao.supervisor.folder import RunFolder
from sao.supervisor.held import held_notices
from sao.supervisor.progress import Progress
from sao.supervisor.status import console_url, notices, summary
from sao.supervisor.storage import storage_notices


def print_status(named: Path) -> bool:
    """Print what the run is doing; whether a supervisor is at work on it, or with a run file, whether its store is."""
    return _by_file(find_run(named)) if names_a_file(named) else _by_folder(named)


def _by_file(run: Run) -> bool:
    """Of a run whose processes are somebody else's, as in a cluster: what its folder and its store say."""
    console, board = Console(), BoardView(run.config)
    answers = board.store_use() is not None
    progress = Progress(RunFolder(run.root).rows_file)
    progress.poll()
    console.print(f"{run.config.task.name}, seed {run.config.run.seed}: {_trainer(board, answers=answers)}")
    for line in (f"{name:<20} {value}" for name, value in _figures(progress)):
        console.print(f"  {line}", highlight=False)
    for line in (
        *notices(progress),
        *held_notices(run.config, run.file),
        *storage_notices(run.config, run.root, board, named=run.file),
        *_engine_lines(board),
    ):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    where = f"port {run.config.reward.port} of the reward service, /console"
    console.print(f"  watch and steer it in a browser: {where}", highlight=False, soft_wrap=True)
    board.close()
    return answers


def _figures(progress: Progress) -> Iterator[tuple[str, str]]:
    yield from summary(progress)
    if progress.last is not None:
        yield "last update", f"{max(time.time() - progress.last.finished_s, 0.0):.0f} s ago"


def _trainer(board: BoardView, *, answers: bool) -> str:
    if not answers:
        return "the store does not answer"
    facts = board.trainer()
    return "no trainer has begun" if facts is None else f"the trainer is {facts.state.value}, start {facts.epoch}"


def _by_folder(root: Path) -> bool:
    folder = RunFolder(root)
    if not folder.run_file.exists():
        typer.echo(f"{root} holds no run: start one with `sao up --preset tiny --run-dir {root}`", err=True)
        return False
    pid = folder.running_pid()
    console = Console()
    config = load_run_config(folder.run_file)
    state = f"running, process {pid}" if pid is not None else _ended(folder)
    console.print(f"{config.task.name}, seed {config.run.seed}: {state}")
    progress = Progress(folder.rows_file)
    progress.poll()
    for name, value in summary(progress):
        console.print(f"  {name:<20} {value}", highlight=False)
    for notice in notices(progress):
        console.print(f"  {notice}", highlight=False)
    for line in held_notices(config, root):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    if pid is not None:
        board = BoardView(config)
        for line in storage_notices(config, root, board):
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
        console.print(process_table(folder))
        for line in _engine_lines(board):
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
        console.print(f"  watch and steer it in a browser: {console_url(config)}", highlight=False, soft_wrap=True)
        board.close()
    return pid is not None


def _ended(folder: RunFolder) -> str:
    """How the last life of a run that is not running ended, as far as its supervisor lived to note it."""
    last = next((event for event in reversed(folder.timeline()) if event.event in {"up", "stopped"}), None)
    return f"not running, {last.detail}" if last is not None and last.event == "stopped" else "not running"


def process_table(folder: RunFolder) -> Table:
    """The run's processes as last written; `dead`: one that should live and does not."""
    # Addresses are there to be copied: folded, never cut.
    table = Table("process", "pid", "state", "starts", box=None)
    table.add_column("listens on", overflow="fold")
    for one in folder.processes():
        alive = one.pid is not None and Path("/proc", str(one.pid)).exists()
        state = one.state if alive or one.pid is None else "dead"
        table.add_row(one.name, str(one.pid or "-"), state, str(one.starts), one.address)
    return table


def _engine_lines(board: BoardView) -> list[str]:
    return [
        f"{name}: {facts.state.value} {facts.version} {facts.error.removeprefix(f'{name}, ')}".rstrip()
        for name, facts in sorted(board.engines().items())
    ]


def print_report(named: Path) -> bool:
    """Write the report and print its summary; whether there was anything to report."""
    run = find_run(named) if names_a_file(named) else None
    root = named if run is None else run.root
    folder = RunFolder(root)
    report = write_report(root, run.config if run else None) if run or folder.run_file.exists() else None
    if report is None:
        typer.echo(f"{root}: no run, or no trajectory was trained on yet", err=True)
        return False
    for line in summary_lines(report):
        typer.echo(line)
    typer.echo(f"{folder.report_file}{os.linesep}{folder.curves_file}")
    return True


def summary_lines(report: Report) -> list[str]:
    """The report in a few lines."""
    first, last = report.reward.first_100, report.reward.last_100
    rise = f"{first:.3f} -> {last:.3f}" if first is not None and last is not None else "fewer than 100 trajectories"
    held = [f"publishing held       {reason}" for reason in report.held]
    drops = ", ".join(f"{count} {reason}" for reason, count in report.drops.items()) or "none"
    rate = report.throughput
    return [
        f"{report.task}, seed {report.seed}: {report.updates} updates, {report.trajectories} trajectories",
        f"reward (mean of 100)  {rise}",
        f"lag                   mean {report.lag.mean:.2f}, max {report.lag.max} updates",
        f"dropped               {drops}",
        f"versions              {len(report.versions)}, newest {report.versions[-1] if report.versions else '-'}",
        f"throughput            {rate.trajectories_per_s:.2f} trajectories/s, {rate.tokens_per_s:.0f} tokens/s",
        f"training              {report.wall.training_s:.0f} s",
        *adaptation_lines(report),
        *held,
    ]
