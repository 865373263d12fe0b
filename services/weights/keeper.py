"""One engine's keeper: it alone writes this engine's facts, and brings it to the fleet's target, round by round.

- Retries are bounded (`attempts` rounds per version), then the engine either goes back to the last good version or
  stays in quarantine.
- A version that ends engines is tried twice, then it counts as one that they could not prove.
- A version that other engines have proven is tried again after `cool_down_s`, as is an engine that was unreachable; a
  version that nobody has proven is not.
- An engine whose label is not ours was restarted, whatever it says otherwise: it goes through a full round again.
- The board may lose what it was told: the facts are compared with it every `probe_s`, and written again. That an engine
  serves is never written on the strength of memory alone; its label is asked first.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sao.board.base import EngineFacts, EngineState
from sao.streams.base import StreamUnavailableError
from sao.telemetry.health import Health
from sao.telemetry.logs import get_logger
from sao.weights.base import VersionStoreError
from sao.weights.manifest import Manifest
from services.weights import metrics
from services.weights.canary import Tolerance
from services.weights.engines.base import EngineControl, EngineError, EngineUnreachableError, UnusableAnswerError
from services.weights.fleet import Fleet
from services.weights.rounds import Round, VerificationError, Verified

log = get_logger(__name__)
_VERIFIED_KEPT = 16
_LOADED = {EngineState.LOADING, EngineState.VERIFYING}
_ENDED_AT_MOST = 2
"""Rounds of one version in which an engine fell silent after it was told to load."""


@dataclass(frozen=True)
class KeeperSettings:
    attempts: int
    poll_s: float
    """How long nothing may be looked at while there is nothing to do."""
    probe_s: float = 1.0
    """Between two looks at a serving engine's label."""
    cool_down_s: float = 10.0
    dtype: str = "float32"
    """What the engine computes in."""


@dataclass
class _GivenUp:
    """A version this engine has used up its attempts on."""

    retry_at: float
    label: str
    unproven: bool


class Keeper:
    def __init__(
        self,
        engine: EngineControl,
        fleet: Fleet,
        settings: KeeperSettings,
        tolerance: Tolerance,
        health: Health,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._fleet = fleet
        self._settings = settings
        self._tolerance = tolerance
        self._health = health
        self._clock = clock
        self._wall_clock = wall_clock
        self._failures: dict[str, int] = {}
        self._given_up: dict[str, _GivenUp] = {}
        self._ended: Counter[str] = Counter()
        self._looked_at = float("-inf")
        self._compared_at = float("-inf")
        self._unwritten = False
        self._answers = False
        """Whether the engine did when last asked."""
        self._silence = ""
        """How it last failed to answer: said once, not every second."""
        self._served_update: int | None = None
        self._undefined = True
        """Whether the engine may be paused, or hold anything: at the start and after a failed round."""
        self.facts = EngineFacts(
            engine_id=engine.engine_id, url=engine.url, state=EngineState.STARTING, version="", since_s=wall_clock()
        )

    async def restore(self) -> None:
        """Take over the list of proven versions; everything else has to be proven again."""
        earlier = (await self._fleet.board.engines()).get(self._engine.engine_id)
        verified = list(earlier.verified) if earlier is not None else []
        await self._write(self.facts.model_copy(update={"verified": verified, "since_s": self._wall_clock()}))

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the engine until told to stop; a round in progress is finished first."""
        while not stop.is_set():
            try:
                acted = await self.step()
            except StreamUnavailableError as error:
                acted = False
                metrics.STORE_ERRORS.labels("board").inc()
                log.warning("board does not answer", engine=self._engine.engine_id, error=str(error))
            except (VersionStoreError, OSError) as error:
                acted = False
                metrics.STORE_ERRORS.labels("store").inc()
                log.warning("store does not answer", engine=self._engine.engine_id, error=str(error))
            self._health.progress()
            if not acted:
                await self._fleet.changed(self._settings.poll_s)

    async def step(self) -> bool:
        """Do the one thing that is due; whether anything was."""
        if self._unwritten or await self._board_differs():
            return await self._tell_again()
        if self._undefined and not self._answers and not await self._meet():
            return False
        target = self._fleet.target
        if target is None:
            return False
        self._measure_lag(target)
        wanted = await self._wanted(target)
        if wanted is None:
            return False
        if self.facts.state is EngineState.SERVING and self.facts.version == wanted:
            return self._due() and not await self._still_serves()
        await self._bring_to(wanted)
        return True

    async def _board_differs(self) -> bool:
        if self._clock() - self._compared_at < self._settings.probe_s:
            return False
        self._compared_at = self._clock()
        found = (await self._fleet.board.engines()).get(self._engine.engine_id)
        if found == self.facts:
            return False
        log.warning(
            "the board lost what it was told, telling it again",
            engine=self._engine.engine_id,
            found=found.state.value if found is not None else "nothing",
            expected=self.facts.state.value,
        )
        return True

    async def _tell_again(self) -> bool:
        if self.facts.state is not EngineState.SERVING or await self._still_serves():
            await self._write(self.facts)
        return True

    async def _meet(self) -> bool:
        """Whether the engine answers; starting takes a minute, and one that does not answer costs it no attempt."""
        if not self._due():
            return False
        try:
            info = await self._engine.model_info()
        except EngineError as error:
            if str(error) != self._silence:
                self._silence = str(error)
                log.info("engine does not answer yet", engine=self._engine.engine_id, error=str(error))
                if self.facts.state is EngineState.STARTING:  # a quarantined one has a reason already
                    await self._write(self.facts.model_copy(update={"error": str(error)}))
            return False
        self._answers, self._silence = True, ""
        await self._fleet.meet(info.model_path)
        return True

    def _due(self) -> bool:
        due = self._clock() - self._looked_at >= self._settings.probe_s
        if due:
            self._looked_at = self._clock()
        return due

    async def _wanted(self, target: Manifest) -> str | None:
        """The version to bring the engine to now, None when there is nothing to try."""
        refused = target.version in self._fleet.refused  # also for an engine that was started anew since
        if not refused and await self._may_try(target.version):
            return target.version
        if not refused and not self._given_up[target.version].unproven:
            return None
        good = await asyncio.to_thread(self._fleet.last_good, target.version)
        return good if good is not None and await self._may_try(good) else None

    async def _may_try(self, version: str) -> bool:
        given_up = self._given_up.get(version)
        if given_up is None:
            return True
        proven = version in self._fleet.evidence
        again = self._clock() >= given_up.retry_at and (proven or not given_up.unproven)
        if not again and self.facts.state is EngineState.QUARANTINED and self._due():
            again = await self._label() not in {None, given_up.label}
        if again:
            del self._given_up[version]
            self._failures.pop(version, None)
        return again

    async def _label(self) -> str | None:
        try:
            return (await self._engine.model_info()).weight_version
        except EngineError:
            return None

    async def _still_serves(self) -> bool:
        """Whether the engine answers with our label; quarantined when not."""
        try:
            label = (await self._engine.model_info()).weight_version
        except EngineError as error:
            self._answers = False
            await self._quarantine(str(error))
            return False
        if label == self.facts.version:
            return True
        metrics.RESTARTS_SEEN.labels(self._engine.engine_id).inc()
        await self._quarantine(f"serves {label!r} instead of {self.facts.version!r}: it was restarted or changed")
        return False

    async def _bring_to(self, version: str) -> None:
        store, engine_id = self._fleet.store, self._engine.engine_id
        loading = f"{engine_id}.loading"
        await asyncio.to_thread(store.lease, version, loading)
        manifest = await asyncio.to_thread(store.manifest, version)
        path = await asyncio.to_thread(store.path, version)
        attempt = Round(
            self._engine,
            manifest,
            path,
            evidence=dict(self._fleet.evidence),
            tolerance=self._tolerance,
            same_dtype=manifest.dtype == self._settings.dtype,
            report=lambda state: self._enter(state, version),
        )
        started = self._clock()
        undefined, self._undefined = self._undefined, True
        try:
            verified = await attempt.run(resume_first=undefined)
        except VerificationError as error:
            metrics.ROUNDS.labels(engine_id, "unproven").inc()
            await self._failed(version, str(error), unproven=True)
            return
        except EngineError as error:
            result = "unreachable" if isinstance(error, EngineUnreachableError) else "refused"
            metrics.ROUNDS.labels(engine_id, result).inc()
            await self._failed(version, str(error), unproven=self._blames_version(version, error))
            return
        await asyncio.to_thread(store.lease, version, engine_id)
        self._undefined = False
        await self._serve(verified)
        seconds = self._clock() - started
        metrics.ROUNDS.labels(engine_id, "ok").inc()
        metrics.ROUND_SECONDS.observe(seconds)
        metrics.PUBLISH_TO_SERVING_SECONDS.observe(max(0.0, self._wall_clock() - manifest.created_s))
        log.info("engine serves", engine=engine_id, version=version, seconds=round(seconds, 4), worst=verified.worst)
        await asyncio.to_thread(store.release, loading)

    def _blames_version(self, version: str, error: EngineError) -> bool:
        """Whether the version is at fault: it gives no log-probs, or it has ended this engine again.

        No log-probs are what NaNs give, and finite weights that overflow. Once is a coincidence, and what has nothing
        proven before it is tried for ever.
        """
        if isinstance(error, UnusableAnswerError):
            return True
        ended = isinstance(error, EngineUnreachableError) and self.facts.state in _LOADED
        self._ended[version] += ended
        proven = version in self._fleet.evidence
        return self._ended[version] >= _ENDED_AT_MOST and not proven and self._fleet.last_good(version) is not None

    async def _serve(self, verified: Verified) -> None:
        manifest = verified.evidence.manifest
        kept = [name for name in self.facts.verified if name != manifest.version]
        facts = self.facts.model_copy(
            update={
                "state": EngineState.SERVING,
                "version": manifest.version,
                "verified": [*kept, manifest.version][-_VERIFIED_KEPT:],
                "error": "",
                "since_s": self._wall_clock(),
            }
        )
        self._looked_at = self._clock()
        self._failures.pop(manifest.version, None)
        self._served_update = manifest.update
        metrics.SERVING_UPDATE.labels(self._engine.engine_id).set(manifest.update)
        self._fleet.proven(verified.evidence)
        await self._write(facts)

    def _measure_lag(self, target: Manifest) -> None:
        if self._served_update is not None:
            metrics.LAG_UPDATES.labels(self._engine.engine_id).set(target.update - self._served_update)

    async def _failed(self, version: str, error: str, *, unproven: bool) -> None:
        self._failures[version] = self._failures.get(version, 0) + 1
        log.error(
            "round failed", engine=self._engine.engine_id, version=version, attempt=self._failures[version], error=error
        )
        if self._failures[version] >= self._settings.attempts:
            retry_at = self._clock() + self._settings.cool_down_s
            label = await self._label()
            self._given_up[version] = _GivenUp(retry_at, label or "", unproven)
            if unproven:
                self._fleet.failed_verification(version, self._engine.engine_id, error)
        await self._quarantine(error)

    async def _quarantine(self, error: str) -> None:
        self._undefined = True
        facts = {"state": EngineState.QUARANTINED, "error": error, "since_s": self._wall_clock()}
        await self._write(self.facts.model_copy(update=facts))

    async def _enter(self, state: EngineState, version: str) -> None:
        facts = {"state": state, "version": version, "since_s": self._wall_clock()}
        await self._write(self.facts.model_copy(update=facts))

    async def _write(self, facts: EngineFacts) -> None:
        self.facts = facts
        self._unwritten = True  # until the board has it: the next step writes it again
        for state in EngineState:
            metrics.ENGINE_STATE.labels(self._engine.engine_id, state.value).set(float(state is facts.state))
        await self._fleet.board.write_engine(facts)
        self._unwritten = False
