"""What the engines share: the version they shall serve, those that were proven, those that are refused."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sao.board.base import Board, EngineFacts, TrainerFacts
from sao.streams.base import StreamUnavailableError
from sao.telemetry.logs import get_logger
from sao.weights.base import UnknownVersionError, VersionStore, VersionStoreError
from sao.weights.checkpoint import CheckpointFormatError, zero_tensors
from sao.weights.manifest import Manifest
from services.weights import metrics
from services.weights.claim import Claim
from services.weights.guards import doubt
from services.weights.holds import Holds
from services.weights.preflight import (
    Layout,
    RefusedVersionError,
    directory_layout,
    inspect,
    layout_difference,
    manifest_layout,
)
from services.weights.readings import Readings
from services.weights.rounds import Evidence, RoundTimings
from services.weights.servings import Servings
from services.weights.staging import Staging

log = get_logger(__name__)
_EVIDENCE_KEPT = 4
_ENGINE_LEASE = re.compile(r"(engine-[0-9a-f-]+)(\.loading)?")
"""Holders of leases that keepers take (keeper.py); others' are left alone."""


OPERATOR_LEASE = "operator"
"""Holder of the lease on the version that publishing is pinned to."""
TARGET_LEASE = "target"
"""Holder of the lease on what the engines shall serve."""
_ROUNDS_KEPT = 32


@dataclass(frozen=True)
class EndedRound:
    """The last round that was to bring a version to an engine; without `timings` it failed, with `error`."""

    timings: RoundTimings | None
    error: str


class Fleet:
    """The shared record; `follow` keeps the target at what the trainer published.

    The target is the version that publishing is pinned to (holds.py), else the newest that the trainer has named, the
    board knows, the store has whole, `preflight.inspect` finds nothing wrong with and nobody holds. One that is refused
    stays refused. When none is left, the target stays what it was.
    Versions don't go back by themselves: an older one is followed only when a trainer that started since names it, not
    when a board that lost its newest facts does.
    """

    def __init__(
        self,
        board: Board,
        store: VersionStore,
        engine_ids: list[str],
        *,
        keep_versions: int,
        holds: Holds,
        drift_max: float | None = None,
        claim: Claim | None = None,
        run_dir: Path | None = None,
    ) -> None:
        """`drift_max`: see `guards.doubt`; `claim`: None where no other service can be; `run_dir`: see `servings`."""
        self._claim = claim
        self.board = board
        self.servings = Servings(board, run_dir)
        self.store = store
        self.holds = holds
        self.staging = Staging(store)
        self.readings = Readings()
        self.target: Manifest | None = None
        self.published = ""
        """The newest version that the trainer has named."""
        self.refused: dict[str, str] = {}
        self.evidence: OrderedDict[str, Evidence] = OrderedDict()
        self.rounds: OrderedDict[str, dict[str, EndedRound]] = OrderedDict()
        """By version and engine."""
        self.serving: dict[str, str] = {}
        """The version that each engine serves now, verified."""
        self._engine_ids = set(engine_ids)
        self._keep_versions = keep_versions
        self._drift_max = drift_max
        self._reference: Layout | None = None
        self._newest: Manifest | None = None
        """Of those that an engine was ever to serve."""
        self._behind = ""
        self._missing = ""
        self._decided: tuple[str, int, int] | None = None
        """What the last choice was made from, so that it is made once."""
        self._refusals = 0
        self._met = False
        self._failed: dict[str, set[str]] = {}
        self._good: list[str] = []
        self._changed = asyncio.Event()
        self._collectable = False

    async def restore(self) -> None:
        """Take over what an earlier process proved, as far as the store still has it.

        The leases say part of it, also when the board was emptied: an engine's own is that of a version it had proven.
        """
        await self.holds.restore()
        committed = set(await asyncio.to_thread(self.store.names))
        await self.lease_pinned()
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
        if self._newest is not None and self.holds.control.accepted is None:  # of a run from before there were guards
            await self.holds.accept(self._newest.version)
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
        turn, pin = self.holds.turn, self.holds.control.pin
        manifest = await self._pinned(pin.version) if pin is not None else await self._newest_good()
        if manifest is None or not await self.keep(manifest.version):
            return False
        if turn != self.holds.turn:  # somebody decided otherwise meanwhile
            if self.target is not None:
                await self.keep(self.target.version)
            return False
        changed = self.aim(manifest)
        if pin is None:
            await self.holds.accept(manifest.version)
        return changed

    async def keep(self, version: str) -> bool:
        """Have the target stay in the store though no engine has begun to load it; False when it has gone already."""
        try:
            await asyncio.to_thread(self.store.lease, version, TARGET_LEASE)
        except UnknownVersionError:
            self._decided = None
            return False
        return True

    def aim(self, manifest: Manifest) -> bool:
        """Make this the version that all engines shall serve; whether it was not."""
        if self.target is not None and self.target.version == manifest.version:
            return False
        if self._reference is None:
            self._reference = manifest_layout(manifest)
        if manifest.version == self.published or self._newest is None or manifest.version > self._newest.version:
            self._newest = manifest
        self.target = manifest
        metrics.PUBLISHED_UPDATE.set(manifest.update)
        self.notify()
        return True

    async def lease_pinned(self) -> None:
        """Keep the pinned version from being collected, and no other because it was pinned before."""
        pin = self.holds.control.pin
        if pin is None:
            await asyncio.to_thread(self.store.release, OPERATOR_LEASE)
            return
        try:
            await asyncio.to_thread(self.store.lease, pin.version, OPERATOR_LEASE)
        except UnknownVersionError:
            self._miss(pin.version)

    async def inspected(self, version: str) -> Manifest:
        """The manifest of a version that may be loaded; RefusedVersionError, and it stays refused, when it may not."""
        if self.target is not None and self.target.version == version:
            return self.target
        started, signature = time.monotonic(), await asyncio.to_thread(self.staging.signature, version)
        try:
            manifest = await asyncio.to_thread(inspect, self.store, version, self._reference, self.readings)
        except RefusedVersionError as error:
            self.refuse(version, error.reason, str(error))
            raise
        self.staging.note(version, signature, time.monotonic() - started)
        return manifest

    async def _pinned(self, version: str) -> Manifest | None:
        """The version that publishing is pinned to, or, at a start that finds it unusable, what was proven last."""
        trainer = await self.board.trainer()
        self.published = trainer.version if trainer is not None and trainer.version else self.published
        if self.target is not None and self.target.version == version:
            return None
        announced, names = await self.board.versions(), await asyncio.to_thread(self.store.names)
        if version not in names:
            self._miss(version)
        good = await asyncio.to_thread(self.last_good, version) if self.target is None else None
        for name in (version, good):
            if name in announced and name in names and name not in self.refused:
                try:
                    return await self.inspected(name)
                except RefusedVersionError:
                    continue
        return None

    def _miss(self, version: str) -> None:
        if self._missing != version:
            self._missing = version
            to_do = "activate another one, or resume"
            log.error("the version that publishing is held at is not in the store", version=version, to_do=to_do)

    async def _newest_good(self) -> Manifest | None:
        """What the target shall be; None when that is undecided, or was decided before."""
        trainer = await self.board.trainer()
        if trainer is None or not trainer.version or self._goes_back(trainer):
            return None
        self.published = trainer.version
        made_from = (trainer.version, self.holds.turn, self._refusals)
        if made_from == self._decided:
            return None
        announced, stored = set(await self.board.versions()), set(await asyncio.to_thread(self.store.names))
        usable, late = announced & stored, trainer.version not in stored
        if trainer.version not in announced or (late and self.target is not None):
            return None
        if late and self._missing != trainer.version:
            self._missing = trainer.version
            log.error("the newest version is not in the store, an earlier one is looked for", version=trainer.version)
        for version in sorted((name for name in usable if name <= trainer.version), reverse=True):
            if (manifest := await self._if_good(version)) is not None:
                break
        else:
            manifest = None
        if not late:
            self._decided = made_from
        return manifest

    async def _if_good(self, version: str) -> Manifest | None:
        """The manifest of a version that neither is refused nor held, after looking for a reason to."""
        control = self.holds.control
        if version in self.refused or version in control.held:
            return None
        try:
            manifest = await self.inspected(version)
        except RefusedVersionError:
            return None
        if version <= (control.accepted or ""):
            return manifest
        zeros = await asyncio.to_thread(zero_tensors, self.store.path(version))
        names = await asyncio.to_thread(self.store.names)
        earlier = [name for name in names if name <= (control.accepted or "")]
        before = await self._first_readable(
            name for name in reversed(earlier) if name not in self.refused and name not in control.held
        )
        found = doubt(manifest, before, zeros=zeros, drift_max=self._drift_max)
        if found is None:
            return manifest
        serving = self.target.version if self.target is not None else ""
        await self.holds.doubted(version, found, serving=serving, stored=names)
        return None

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
        self._refusals += 1
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
        if failed >= self._engine_ids and version not in self.evidence and version not in self.refused:
            self.refuse(version, "canary", f"no engine could prove it; last: {detail}")

    def ended(self, engine_id: str, version: str, *, timings: RoundTimings | None = None, error: str = "") -> None:
        """Remember how a round ended."""
        self.rounds.setdefault(version, {})[engine_id] = EndedRound(timings, error)
        self.rounds.move_to_end(version)
        while len(self.rounds) > _ROUNDS_KEPT:
            self.rounds.popitem(last=False)

    @property
    def epoch(self) -> int:
        """What this service claimed; its writes carry it."""
        return self._claim.epoch if self._claim is not None else 0

    def stands(self, facts: EngineFacts) -> None:
        """Note what an engine serves, or that it serves nobody."""
        self.serving.pop(facts.engine_id, None)
        if facts.in_rotation:
            self.serving[facts.engine_id] = facts.version

    def join(self, engine_id: str) -> None:
        """Count on this engine from now on."""
        self._engine_ids.add(engine_id)

    def leave(self, engine_id: str) -> None:
        """Count on this engine no more."""
        self._engine_ids.discard(engine_id)
        self.serving.pop(engine_id, None)

    def last_good(self, excluding: str) -> str | None:
        """The version proven last, but not `excluding`, that nobody holds, nothing refuses and the store still has."""
        usable = set(self.store.names()) - self.holds.control.held.keys() - self.refused.keys() - {excluding}
        return next((name for name in reversed(self._good) if name in usable), None)

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
