"""What the engines share: the version they shall serve, those that were proven, those that are refused."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from sao.board.base import Board, TrainerFacts
from sao.streams.base import StreamUnavailableError
from sao.telemetry.logs import get_logger
from sao.weights.base import VersionStore, VersionStoreError
from sao.weights.checkpoint import CheckpointFormatError
from sao.weights.manifest import Manifest
from services.weights import metrics
from services.weights.preflight import (
    Layout,
    RefusedVersionError,
    directory_layout,
    inspect,
    layout_difference,
    manifest_layout,
)
from services.weights.rounds import Evidence

log = get_logger(__name__)
_EVIDENCE_KEPT = 4
_ENGINE_LEASE = re.compile(r"(engine-[0-9]+)(\.loading)?")
"""Holders of leases that keepers take (keeper.py); others' are left alone."""


class Fleet:
    """The shared record; `follow` keeps the target at what the trainer published.

    A version becomes the target when the trainer names it, the board knows it, the store has it whole and
    `preflight.inspect` finds nothing wrong. One that is refused stays refused, and the target stays what it was.
    Versions don't go back: an older one is followed only when a trainer that started since names it, not when a board
    that lost its newest facts does.
    """

    def __init__(self, board: Board, store: VersionStore, engine_ids: list[str], *, keep_versions: int) -> None:
        self.board = board
        self.store = store
        self.target: Manifest | None = None
        self.refused: dict[str, str] = {}
        self.evidence: OrderedDict[str, Evidence] = OrderedDict()
        self._engine_ids = engine_ids
        self._keep_versions = keep_versions
        self._reference: Layout | None = None
        self._newest: Manifest | None = None
        """Of those that an engine was ever to serve."""
        self._behind = ""
        self._met = False
        self._failed: dict[str, set[str]] = {}
        self._good: list[str] = []
        self._changed = asyncio.Event()
        self._collectable = False

    async def restore(self) -> None:
        """Take over what an earlier process proved, as far as the store still has it.

        The leases say part of it, also when the board was emptied: an engine's own is that of a version it had proven.
        """
        committed = set(await asyncio.to_thread(self.store.names))
        leases = await asyncio.to_thread(self.store.leases)
        engines = {holder: match for holder in sorted(leases) if (match := _ENGINE_LEASE.fullmatch(holder))}
        proven = {leases[holder] for holder, match in engines.items() if not match[2]}
        for facts in (await self.board.engines()).values():
            proven.update(facts.verified)
        self._good = sorted(proven & committed)
        for holder, match in engines.items():
            if match[1] not in self._engine_ids:
                log.info("lease of an engine that left the run is given back", holder=holder, version=leases[holder])
                await asyncio.to_thread(self.store.release, holder)
        known = proven | {leases[holder] for holder in engines}
        self._newest = await self._first_readable(sorted(known & committed, reverse=True))
        oldest = await self._first_readable(sorted(set(leases.values()) & set(self._good)))
        self._reference = manifest_layout(oldest) if oldest is not None else None

    async def _first_readable(self, versions: Iterable[str]) -> Manifest | None:
        for version in versions:
            try:
                return await asyncio.to_thread(self.store.manifest, version)
            except VersionStoreError as error:
                log.warning("a proven version is unreadable", version=version, error=str(error))
        return None

    async def meet(self, launch_checkpoint: str) -> None:
        """Hold versions against the checkpoint an engine was started from, when it lies on our file system.

        A first version that was inspected before any engine answered is looked at again.
        """
        if self._met or not launch_checkpoint:
            return
        try:
            layout = await asyncio.to_thread(directory_layout, Path(launch_checkpoint))
        except (CheckpointFormatError, OSError) as error:
            log.warning("launch checkpoint is unreadable", path=launch_checkpoint, error=str(error))
            return
        if not layout:
            return
        self._met = True
        target, own = self.target, self._reference
        if own is None:
            self._reference = layout
        elif target is not None and not self._good and (found := layout_difference(own, layout, dtypes=False)):
            self._reference, self.target = layout, None
            self.refuse(target.version, "layout", f"not the tensors of {launch_checkpoint}: {found}")

    async def follow(self) -> bool:
        """Look at the board once; whether the target changed."""
        trainer = await self.board.trainer()
        version = trainer.version if trainer is not None else ""
        known = self.target.version if self.target is not None else ""
        if trainer is None or version in {"", known} or version in self.refused or self._goes_back(trainer):
            return False
        if version not in await self.board.versions() or version not in await asyncio.to_thread(self.store.names):
            return False
        try:
            manifest = await asyncio.to_thread(inspect, self.store, version, self._reference)
        except RefusedVersionError as error:
            self.refuse(version, error.reason, str(error))
            return False
        if self._reference is None:
            self._reference = manifest_layout(manifest)
        self.target = self._newest = manifest
        metrics.PUBLISHED_UPDATE.set(manifest.update)
        self.notify()
        return True

    def _goes_back(self, trainer: TrainerFacts) -> bool:
        """Whether these facts are from before the newest version; said once for each version they name."""
        newest = self._newest
        if newest is None or trainer.version >= newest.version or trainer.epoch > newest.trainer_epoch:
            return False
        if self._behind != trainer.version:
            self._behind = trainer.version
            log.warning(
                "the board names an older version and no newer trainer: was it lost?",
                found=trainer.version,
                newest=newest.version,
                epoch=trainer.epoch,
            )
        return True

    def refuse(self, version: str, reason: str, detail: str) -> None:
        """Never let this version serve."""
        self.refused[version] = detail
        metrics.VERSIONS_REFUSED.labels(reason).inc()
        log.error("version refused", version=version, reason=reason, detail=detail)

    def proven(self, evidence: Evidence) -> None:
        """An engine serves this version, and that is sure."""
        version = evidence.manifest.version
        self.evidence[version] = evidence
        self.evidence.move_to_end(version)
        while len(self.evidence) > _EVIDENCE_KEPT:
            self.evidence.popitem(last=False)
        if version in self._good:
            self._good.remove(version)
        self._good.append(version)
        del self._good[:-16]
        self._collectable = True
        self.notify()

    def failed_verification(self, version: str, engine_id: str, detail: str) -> None:
        """An engine used up its attempts on this version; when all have and none passed, it is refused."""
        failed = self._failed.setdefault(version, set())
        failed.add(engine_id)
        if failed >= set(self._engine_ids) and version not in self.evidence and version not in self.refused:
            self.refuse(version, "canary", f"no engine could prove it; last: {detail}")

    def last_good(self, excluding: str) -> str | None:
        """The version proven last, other than `excluding`, that the store still has."""
        committed = set(self.store.names())
        return next((name for name in reversed(self._good) if name != excluding and name in committed), None)

    async def collect(self) -> None:
        """Remove versions nobody needs; outside the rounds, which must be short."""
        removed = await asyncio.to_thread(self.store.collect, self._keep_versions)
        if removed:
            metrics.VERSIONS_COLLECTED.inc(len(removed))
            log.info("old versions collected", versions=removed)

    def notify(self) -> None:
        """Wake everyone in `changed`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout_s: float) -> None:
        """Return when something here changed, at the latest after `timeout_s`."""
        event = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return

    async def run(self, stop: asyncio.Event, poll_s: float) -> None:
        """Follow the board until told to stop."""
        while not stop.is_set():
            try:
                await self.follow()
                if self._collectable:
                    self._collectable = False
                    await self.collect()
            except StreamUnavailableError as error:
                metrics.STORE_ERRORS.labels("board").inc()
                log.warning("board does not answer", error=str(error))
            except (VersionStoreError, OSError) as error:
                metrics.STORE_ERRORS.labels("store").inc()
                log.warning("store does not answer", error=str(error))
            try:
                async with asyncio.timeout(poll_s):
                    await stop.wait()
            except TimeoutError:
                continue
        self.notify()
