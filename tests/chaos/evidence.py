"""Gathers what the audit judges: the ledger, the archive, the final checkpoint, the trainer's drops, the streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from sao.accepted import LOST_FILE
from sao.archive import Archive
from sao.redis_client import RunKeys
from sao.rows import read_rows
from sao.streams.base import StreamName
from services.reward.preferences.folder import PreferenceFolder
from services.trainer.checkpoint import CheckpointStore, Progress
from services.trainer.drops import FILE as DROPS
from services.trainer.drops import read_drops
from services.trainer.recovery import effective_steps
from tests.chaos.audit import Evidence

ACKNOWLEDGED = {"accepted", "duplicate"}


def gather(folder: Path, run: str, client: redis.Redis) -> Evidence:
    """Everything about a run whose trainer has ended in good order and whose Valkey still answers."""
    progress = final_progress(folder, run)
    answers = list(json_lines(folder / "acknowledged.jsonl"))
    archive = Archive(folder / "archive")
    trained: list[str] = []
    dropped = {drop.trajectory: drop.reason for drop in read_drops(folder / DROPS) if not drop.buried}
    for step in effective_steps(archive, progress):
        archived = archive.load(step.name)
        ids = [one.trajectory.id for one in archived.trajectories]
        trained += ids
        if archived.skipped:
            dropped |= dict.fromkeys(ids, f"update skipped: {archived.skipped_reason}")
    keys = RunKeys(run)
    named = {line["trajectory"]: line["ordinal"] for line in json_lines(folder / LOST_FILE)}
    again = slots_under_way(client, keys)
    on_streams = {fields["_id"] for name in StreamName for fields in entries(client, keys.stream(name))}
    for_feedback: Any = client.hkeys(keys.waiting)
    return Evidence(
        acknowledged={line["trajectory"] for line in answers if line["status"] in ACKNOWLEDGED},
        superseded={line["trajectory"] for line in answers if line["status"] == "superseded"},
        trained=trained,
        dead={fields["_id"]: fields["reason"] for fields in entries(client, keys.dead)},
        dropped=dropped,
        waiting=on_streams | {one.decode() for one in for_feedback} | again_from_the_archive(archive, progress),
        named=named.keys(),
        not_leased_again={one for one, ordinal in named.items() if not again(ordinal)},
        preferences=(int(client.hget(keys.board, "preference") or 0), PreferenceFolder(folder).newest()),
        counted=progress.dropped,
        consumed=progress.consumed,
    )


def again_from_the_archive(archive: Archive, progress: Progress) -> set[str]:
    """Ids of the steps that the final checkpoint lacks: the next start would train on them before anything else."""
    held = {step.name for step in effective_steps(archive, progress)}
    lacking = [name for name in archive.steps() if name not in held]
    return {one.trajectory.id for name in lacking for one in archive.load(name).trajectories}


def slots_under_way(client: redis.Redis, keys: RunKeys) -> Callable[[int], bool]:
    """Whether a slot is done, leased now, or among those that the next leases go through one by one."""
    frontier = int(client.get(keys.frontier) or 0)
    cursor = max(int(client.get(keys.cursor) or 0), frontier)
    found: list[Any] = [*client.zrange(keys.winners, 0, -1), *client.zrange(keys.lease_expiry, 0, -1)]
    beyond = {int(slot) for slot in found}
    return lambda slot: slot < frontier or slot in beyond or slot >= cursor


def final_progress(folder: Path, run: str) -> Progress:
    """Of the newest whole checkpoint; LookupError when there is none."""
    found = CheckpointStore(folder / "checkpoints", run, keep_last=1, keep_every=0, min_free_bytes=0).newest()
    if found is None:
        msg = f"{folder}: no whole checkpoint, so there is no final state to audit"
        raise LookupError(msg)
    return found.progress


def rewards(folder: Path, last: int) -> list[float]:
    """Of the newest trajectories that trained, also by steps that a fall-back has undone since."""
    return [one.reward for row, _ in read_rows(folder / "updates.jsonl") for one in row.trajectories][-last:]


def entries(client: redis.Redis, stream: str) -> Iterator[dict[str, str]]:
    """The fields of every entry on a stream."""
    rows: Any = client.xrange(stream)
    for _, fields in rows:
        yield {name.decode(): value.decode() for name, value in fields.items()}


def events(folder: Path, process: str, event: str) -> Iterator[dict[str, Any]]:
    """The structured log lines of one kind that all starts of a process wrote, in order."""
    for path in sorted((folder / "logs").glob(f"{process}.*.log")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("{") and f'"{event}"' in line and (parsed := json.loads(line))["event"] == event:
                yield parsed


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Each line of a file; of one that is not there, none."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)
