"""The trainer's first step: claim the store, and give back what it has forgotten.

A store that was restarted without its file has lost epochs, versions, the slots that are done, and whatever waited in
it; with an older file, the newest of each. Until a trainer claims an epoch, a store that has none takes no trajectory
and gives out no prompt, so that there is time for this order:

1. name what is lost: accepted (`sao.accepted`), neither trained on nor dropped, and no longer known to the store
2. have known versions known again, and done slots done again; whatever is lost is not among them: it is leased anew
3. claim an epoch above every one that the run's folder knows, where the store is still as it was found and restored

An older file of the newest epoch shows nowhere in the epochs, so every start restores. Each step may be repeated: a
start that is killed in the middle is made good by the next one, and a store that is emptied in the middle is restored
anew. Preferences are the reward service's to give back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from sao.accepted import LOST_FILE, accepted
from sao.archive import Archive
from sao.atomic import append_line, fsync_file
from sao.board.base import Board, VersionRecord
from sao.ids import uuid7_unix_ms
from sao.slots import Slots
from sao.streams.base import TrajectoryStreams
from sao.telemetry.logs import get_logger
from sao.weights.base import VersionStore
from services.trainer import metrics
from services.trainer.drops import FILE, read_drops
from services.trainer.outage import ride_out

log = get_logger(__name__)

ANNOUNCED_FILE = "versions.jsonl"
_HOUR_MS = 3_600_000
_SHOWN = 20


class Lost(BaseModel):
    """A line of `<run.dir>/lost.jsonl`: an accepted trajectory that the store has lost."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trajectory: str
    ordinal: int
    sample: int
    found_s: float
    """Unix seconds of the start that missed it."""


@dataclass(frozen=True)
class Claim:
    """How the store was found, and the epoch that is this process's own."""

    epoch: int
    forgot: bool
    """It knew an older epoch than the run's folder does, or none."""


async def claim_store(
    run_dir: Path,
    *,
    board: Board,
    streams: TrajectoryStreams,
    store: VersionStore,
    archive: Archive,
    done: Slots,
    samples: int,
    horizon_h: int,
) -> Claim:
    """Find out what is lost, restore what is known, claim an epoch; `done` is what this trainer trains on no more."""
    known = known_epoch(store, archive)
    forgot = emptied = False
    while True:
        found = await ride_out(board.epoch)
        if found < known:
            forgot = True
            emptied = emptied or found == 0
            metrics.STORE_RESTORED.inc()
            log.error("the store has forgotten this run: restoring it from the run's folder", epoch=found, known=known)
        lost = await _lost(run_dir, streams, done, 0 if emptied else time.time_ns() // 1_000_000 - horizon_h * _HOUR_MS)
        if lost:
            _tell(run_dir, lost, samples)
        oldest = await _announce(_announced(run_dir, store if forgot else None), board)
        await ride_out(partial(streams.restore, done))
        claim = partial(board.new_trainer_epoch, above=known, found=found, version=oldest)
        if epoch := await ride_out(claim):
            return Claim(epoch, forgot)
        log.warning("the store has changed while it was claimed: looking at it again", found=found)


def known_epoch(store: VersionStore, archive: Archive) -> int:
    """The newest trainer epoch that has committed a version or begun to work; 0: none."""
    newest = store.names()[-1:]
    return max(store.manifest(newest[0]).trainer_epoch if newest else 0, archive.newest_epoch())


def named_lost(run_dir: Path) -> set[str]:
    """Ids that an earlier start has named."""
    path = run_dir / LOST_FILE
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return {Lost.model_validate_json(line).trajectory for line in lines}


async def _lost(run_dir: Path, streams: TrajectoryStreams, done: Slots, since_ms: int) -> dict[str, int]:
    """Slots by id. Of ids older than the store's horizon nothing can be told while it has its file."""
    open_ids = {one: slot for one, slot in accepted(run_dir) if slot not in done and uuid7_unix_ms(one) >= since_ms}
    if not open_ids:
        return {}
    told = named_lost(run_dir) | {drop.trajectory for drop in read_drops(run_dir / FILE) if not drop.buried}
    asked = sorted((one for one in open_ids if one not in told), key=lambda one: (open_ids[one], one))
    there = await ride_out(partial(streams.recognised, asked))
    return {one: open_ids[one] for one in asked if one not in there}


def _tell(run_dir: Path, lost: dict[str, int], samples: int) -> None:
    """Durable before the slots are leased again."""
    now = time.time()
    rows = []
    for trajectory_id, slot in lost.items():
        ordinal, sample = divmod(slot, samples)
        rows.append(Lost(trajectory=trajectory_id, ordinal=ordinal, sample=sample, found_s=now))
    for row in rows:
        append_line(run_dir / LOST_FILE, row.model_dump_json().encode())
    fsync_file(run_dir / LOST_FILE)
    metrics.STORE_LOST.inc(len(rows))
    log.error(
        "accepted trajectories are lost with the store, their prompts are leased again",
        lost=len(rows),
        all_of_them=str(run_dir / LOST_FILE),
        ordinals=[row.ordinal for row in rows[:_SHOWN]],
        trajectories=[row.trajectory for row in rows[:_SHOWN]],
    )


async def _announce(records: Mapping[str, VersionRecord], board: Board) -> str:
    """Every one that is not there, oldest first: what was sampled from collected ones still comes. The oldest there."""
    there = set(await ride_out(board.versions))
    newest = await ride_out(board.epoch)
    for name, record in sorted(records.items()):
        if name not in there and record.epoch >= newest:
            await ride_out(partial(board.announce_version, record))
            there.add(name)
    return min(there, default="")


def _announced(run_dir: Path, store: VersionStore | None) -> dict[str, VersionRecord]:
    """By name. With the store: the newest stored one may lack its line, its trainer was killed before it wrote that."""
    path = run_dir / ANNOUNCED_FILE
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found = {record.name: record for record in map(VersionRecord.model_validate_json, lines)}
    if store is None:
        return found
    for name in store.names():
        if name not in found:
            manifest = store.manifest(name)
            found[name] = VersionRecord(
                name=name, update=manifest.update, parent=manifest.parent, epoch=manifest.trainer_epoch
            )
    return found
