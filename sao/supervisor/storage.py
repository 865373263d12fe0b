"""Lines about where trajectories wait: the store, its dead letters, the workers' spools. None while all is well."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sao.accepted import LOST_FILE
from sao.config import RunConfig
from sao.store_memory import Pressure, StoreUse, advice, contents, pressure, waiting_dead
from sao.supervisor.board_view import BoardView

WAITS_S = 10.0
"""Every finished trajectory passes through the spool; one that lies there for longer is not being taken."""


@dataclass(frozen=True, slots=True)
class SpoolFiles:
    """What lies in the spools of all workers that write to this machine."""

    waiting: int = 0
    """Finished trajectories that ingest has not taken for WAITS_S."""
    oldest_s: float = 0.0
    damaged: int = 0
    """Files that a crash or the disk cut short."""


def storage_notices(config: RunConfig, root: Path, view: BoardView, *, named: Path | None = None) -> list[str]:
    """Everything below, read now; `root` is the run's folder, `named` what commands call the run, if not that."""
    folder = config.rollout.spool_dir or root / "spool"
    return [
        *store_notices(view.store_use(), config, named or root),
        *spool_notices(look_into(folder, time.time()), folder),
        *lost_notices(root / LOST_FILE),
    ]


def store_notices(use: StoreUse | None, config: RunConfig, named: Path) -> list[str]:
    """What a person should know of the store and of the dead letters in it; None: it does not answer."""
    if use is None:
        where = _without_password(config.redis.url)
        what = "services wait for it and go on by themselves; is it running, what does its log say"
        return [f"STORE DOES NOT ANSWER at {where}: {what}"]
    return [*_memory(use, config), *_feedback(use, time.time()), *_dead(use, named)]


def _memory(use: StoreUse, config: RunConfig) -> Iterator[str]:
    holds, do = contents(use), advice(use, config.redis)
    match pressure(use.share, config.redis):
        case Pressure.FULL:
            yield f"STORE FULL, {use.share:.0%} of its memory: it takes nothing new, the rest drains. {holds}. {do}"
        case Pressure.MARK:
            mark = f"STORE AT {use.share:.0%} of its memory, the mark is {config.redis.back_pressure_at:.0%}"
            yield f"{mark}: ingest refuses, workers keep what they finish. {holds}. {do}"


def _feedback(use: StoreUse, now_s: float) -> Iterator[str]:
    oldest_ms = use.feedback.oldest_ms
    if oldest_ms is not None:
        oldest = f"the oldest for {max(now_s - oldest_ms / 1000, 0):.0f} s"
        yield f"{use.feedback.waiting} trajectories wait for feedback, {oldest} (docs/feedback.md)"


def _dead(use: StoreUse, named: Path) -> Iterator[str]:
    if kinds := waiting_dead(use.dead):
        by_kind = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
        listed = f"`sao dead list {shlex.quote(str(named))}` says why"
        yield f"{sum(kinds.values())} dead letters wait for a decision: {by_kind} ({listed}; docs/dead-letters.md)"


def look_into(folder: Path, now_s: float) -> SpoolFiles:
    """What lies in the spools below `folder`."""
    ages = [age for age in (_age(file, now_s) for file in folder.glob("*/*.pb")) if age >= WAITS_S]
    return SpoolFiles(len(ages), max(ages, default=0.0), len(list(folder.glob("*/*.torn"))))


def _age(file: Path, now_s: float) -> float:
    try:
        return now_s - file.stat().st_mtime
    except FileNotFoundError:  # ingest has just taken it
        return 0.0


def spool_notices(files: SpoolFiles, folder: Path) -> list[str]:
    """What a person should know of the workers' spools."""
    lines = []
    if files.waiting:
        oldest = f"the oldest for {files.oldest_s:.0f} s"
        do = "workers offer them again by themselves; is ingest running, is the store at its mark, is a worker left"
        lines.append(f"{files.waiting} finished trajectories wait for ingest in {folder}, {oldest}: {do}")
    if files.damaged:
        do = "their prompts are played again; look at the disk, then delete them"
        lines.append(f"{files.damaged} damaged files (.torn) in {folder}: a crash or the disk cut them short; {do}")
    return lines


def lost_notices(file: Path) -> list[str]:
    """What a person should know of what a store has lost with its file, ever since the run began."""
    lost = file.read_bytes().count(b"\n") if file.exists() else 0
    if not lost:
        return []
    return [
        f"{lost} accepted trajectories were lost with the store: {file} names them, their prompts were leased again"
    ]


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
