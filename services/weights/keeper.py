"""One engine's keeper: it alone writes this engine's facts, and brings it to the fleet's target, round by round.

- Retries are bounded (`attempts` rounds per version), then the engine either goes back to the last good version or
  stays in quarantine.
- A version that ends engines is tried twice, then it counts as one that they could not prove.
- A version that was given up is tried again after `cool_down_s`, then with one round ever later, up to `_LATER_MOST`
  times as long, for each try is a failed round more, or takes the engine out of rotation; at once when an engine that
  did not answer answers again. One that nobody could prove is not tried again.
- A version whose files are found damaged when an engine was started anew is refused only if no other engine serves it,
  verified: else this engine waits, and the others go on.
- All that can be done before an engine leaves rotation is done before (staging.py); a version found damaged then never
  costs the engine what it serves.
- An engine that serves leaves rotation only with a slot (slots.py); while it waits for one it goes on serving.
- Without a flush (`PauseMode.IN_PLACE`) an engine only goes forward, from a version it serves to one newer than all it
  ever served: every other round begins with an empty cache, so that no salt ever comes back to keys and values of other
  weights. On the way back a request of the newer version is computed under the older, and cached under the newer salt.
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
from sao.telemetry.traces import OFF, Tracer, context_of_version
from sao.weights.base import IncompleteVersionError, VersionStoreError
from sao.weights.manifest import Manifest
from services.weights import metrics
from services.weights.canary import Tolerance
from services.weights.engines.base import (
    EngineControl,
    EngineError,
    EngineUnreachableError,
    PauseMode,
    UnusableAnswerError,
)
from services.weights.engines.releases import TESTED, UnsupportedReleaseError, is_tested
from services.weights.fleet import Fleet
from services.weights.rounds import Round, RoundTimings, VerificationError, Verified
from services.weights.slots import Slots, Standing
from services.weights.staging import Staged, on_this_host

log = get_logger(__name__)
_VERIFIED_KEPT = 16
_LATER_MOST = 8
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
    mode: PauseMode = PauseMode.RETRACT
    """Of rounds that bring a serving engine to a newer version."""


@dataclass
class _GivenUp:
    """A version this engine has used up its attempts on."""

    retry_at: float
    label: str
    """What the engine was left with by us."""
    unproven: bool
    refused: bool = False
    """The engine answered, with an error: what it served before may still load."""
    damaged: bool = False
    """Its files: another engine that serves it is why it is not refused."""


class Keeper:
    def __init__(
        self,
        engine: EngineControl,
        fleet: Fleet,
        settings: KeeperSettings,
        tolerance: Tolerance,
        health: Health,
        *,
        slots: Slots | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        tracer: Tracer = OFF,
    ) -> None:
        """`slots`: shared with the other keepers; None for an engine that is alone."""
        self._engine = engine
        self._fleet = fleet
        self._slots = slots if slots is not None else Slots(None, hold_s=float("inf"), clock=clock)
        self._settings = settings
        self._tolerance = tolerance
        self._health = health
        self._clock = clock
        self._wall_clock = wall_clock
        self._tracer = tracer
        self._failures: dict[str, int] = {}
        self._given_up: dict[str, _GivenUp] = {}
        self._times_given_up: Counter[str] = Counter()
        """In a row."""
        self._told = ("", "")
        """The version given up last, and why: said once, not every few seconds."""
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
        self.last_round: RoundTimings | None = None
        """Of the newest one that succeeded."""
        self._local = on_this_host(engine.url)
        self._reading: tuple[str, asyncio.Future[Staged]] | None = None
        self._staged: Staged | None = None
        """For the round that is due."""
        self._began = clock()
        self._paused_s = 0.0
        self.facts = EngineFacts(
            engine_id=engine.engine_id, url=engine.url, state=EngineState.STARTING, version="", since_s=wall_clock()
        )

    async def restore(self) -> None:
        """Take over the list of proven versions; everything else has to be proven again."""
        earlier = (await self._fleet.board.engines()).get(self._engine.engine_id)
        leases = await asyncio.to_thread(self._fleet.store.leases)
        now = self._wall_clock()
        verified = list(earlier.verified) if earlier is not None else []
        # A process that ended in the middle of a round has told nobody what its engine was left with. A board that lost
        # its last second says that it served; the lease that a round begins with is not lost.
        sure = earlier is not None and earlier.in_rotation and self.loading not in leases
        doubted_s = earlier.doubted_s if earlier is not None and sure else now
        facts = {"verified": verified, "doubted_s": doubted_s, "since_s": now}
        await self._write(self.facts.model_copy(update=facts))

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the engine until told to stop; a round in progress is finished first."""
        try:
            await self._keep(stop)
        finally:
            if self._reading is not None:
                self._reading[1].cancel()

    async def _keep(self, stop: asyncio.Event) -> None:
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
        wanted = await self._due_version()
        serving = self.facts.state is EngineState.SERVING
        if wanted is None or (serving and self.facts.version == wanted):
            self._slots.withdraw(self._engine.engine_id)
            self._stand(Standing.AWAY)
            return serving and self._due() and not await self._still_serves()
        if not await self._stage(wanted):
            return serving and self._due() and not await self._still_serves()
        if not serving:  # it may have asked while it still did
            self._slots.withdraw(self._engine.engine_id)
        elif not self._slots.take(self._engine.engine_id):
            return self._due() and not await self._still_serves()
        self._slots.stands(self._engine.engine_id, Standing.COMING)
        try:
            await self._bring_to(wanted)
        finally:
            self._slots.give_back(self._engine.engine_id)
            self._stand(Standing.COMING)  # one whose round failed is tried again, or taken back: the next step tells
            self._fleet.notify()
        return True

    async def _due_version(self) -> str | None:
        """What the engine shall serve now; None while it does not answer, or nothing is to be tried."""
        if self._undefined and not self._answers and not await self._meet():
            return None
        target = self._fleet.target
        if target is None:
            return None
        self._measure_lag(target)
        return await self._wanted(target)

    def _stand(self, otherwise: Standing) -> None:
        serving = self.facts.state is EngineState.SERVING
        self._slots.stands(self._engine.engine_id, Standing.SERVING if serving else otherwise)

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
            release = await self._engine.server_release()
            tested = is_tested(self._engine.engine_id, release)
        except UnsupportedReleaseError as error:
            if str(error) != self._silence:
                self._silence = str(error)
                log.warning("engine refused", engine=self._engine.engine_id, error=str(error))
                await self._quarantine(str(error))
            return False
        except EngineError as error:
            if str(error) != self._silence:
                self._silence = str(error)
                log.info("engine does not answer yet", engine=self._engine.engine_id, error=str(error))
                if self.facts.state is EngineState.STARTING:  # a quarantined one has a reason already
                    await self._write(self.facts.model_copy(update={"error": str(error)}))
            return False
        if self._silence:
            self._try_at_once()
        self._answers, self._silence = True, ""
        self._looked_at = float("-inf")  # it may have been started anew: its label is news
        if not tested:
            log.warning("untested SGLang release", engine=self._engine.engine_id, found=release, tested=TESTED)
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
        given_up = self._given_up.get(target.version)
        if not refused and given_up is not None and not (given_up.unproven or given_up.refused):
            return None
        good = await asyncio.to_thread(self._fleet.last_good, target.version)
        return good if good is not None and await self._may_try(good) else None

    def _try_at_once(self) -> None:
        """What was given up because the engine did not answer, now that it does."""
        for version, given_up in list(self._given_up.items()):
            if not (given_up.unproven or given_up.refused or given_up.damaged):
                del self._given_up[version]
                self._failures.pop(version, None)

    async def _may_try(self, version: str) -> bool:
        given_up = self._given_up.get(version)
        if given_up is None:
            return True
        proven = version in self._fleet.evidence
        again = self._clock() >= given_up.retry_at and (proven or not given_up.unproven)
        again = again or (given_up.damaged and not self._served_elsewhere(version))
        started_anew = False
        if not again and self.facts.state is EngineState.QUARANTINED and self._due():
            label = await self._label()
            self._answers = label is not None  # one that does not is met anew, and tried at once then
            again = started_anew = label not in {None, given_up.label}
        if again:
            del self._given_up[version]
            self._failures[version] = 0 if started_anew else self._settings.attempts - 1
        return again

    def _served_elsewhere(self, version: str) -> bool:
        return any(served == version for other, served in self._fleet.serving.items() if other != self.facts.engine_id)

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
        self._answers, self._looked_at = False, float("-inf")  # another release may have been started: meet it anew
        await self._quarantine(f"serves {label!r} instead of {self.facts.version!r}: it was restarted or changed")
        return False

    @property
    def loading(self) -> str:
        """Holder of the lease on what the engine is brought to."""
        return f"{self._engine.engine_id}.loading"

    async def _stage(self, version: str) -> bool:
        """Whether the version's files are ready for the engine; one that is damaged is not tried for a while.

        Reading may take minutes: after `probe_s` there are other things to look at.
        """
        if self._staged is not None and self._staged.version == version:
            return True
        if self._reading is None:
            await asyncio.to_thread(self._fleet.store.lease, version, self.loading)
            self._reading = version, asyncio.ensure_future(self._fleet.staging.stage(version, local=self._local))
        found, reading = self._reading
        if not (await asyncio.wait([reading], timeout=self._settings.probe_s))[0]:
            return False
        self._reading = None
        try:
            self._staged = reading.result()
        except IncompleteVersionError as error:
            elsewhere = self._served_elsewhere(found)
            self._give_up(found, str(error), await self._label(), unproven=not elsewhere, damaged=elsewhere)
            if not elsewhere and found not in self._fleet.refused:
                self._fleet.refuse(found, "files", str(error))
            if self.facts.state is not EngineState.SERVING:
                await self._quarantine(str(error))
            return False
        return found == version  # else another one is wanted by now

    async def _bring_to(self, version: str) -> None:
        store, engine_id = self._fleet.store, self._engine.engine_id
        staged, self._staged = self._staged, None
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
            mode=self._mode(version),
            replaces=self.facts.version,
            staged_s=staged.seconds if staged is not None else 0.0,
        )
        started = self._clock()
        undefined, self._undefined = self._undefined, True
        try:
            if undefined:  # it may have been started anew since it was met
                is_tested(engine_id, await self._engine.server_release())
            with self._tracer.span("round", context_of_version(manifest.run, version), always=True) as span:
                span.set(engine=engine_id, version=version, update=manifest.update)
                verified = await attempt.run(resume_first=undefined)
        except VerificationError as error:
            self._fleet.ended(engine_id, version, error=str(error))
            metrics.ROUNDS.labels(engine_id, "unproven").inc()
            await self._failed(version, str(error), unproven=True)
            return
        except EngineError as error:
            self._fleet.ended(engine_id, version, error=str(error))
            silent = isinstance(error, EngineUnreachableError)
            metrics.ROUNDS.labels(engine_id, "unreachable" if silent else "refused").inc()
            await self._failed(version, str(error), unproven=self._blames_version(version, error), refused=not silent)
            if silent and version in self._given_up:
                self._answers = False  # tried again when it answers: until then it holds nobody back
            return
        except StreamUnavailableError:
            # The next attempt resumes what this one left behind, loaded or not: a turn that crosses it proves nothing.
            self.facts = self.facts.model_copy(update={"doubted_s": self._wall_clock()})
            raise
        await asyncio.to_thread(store.lease, version, engine_id)
        self._undefined = False
        self._fleet.ended(engine_id, version, timings=verified.timings)
        await self._serve(verified)
        self._measure_pause(verified.timings)
        seconds = self._clock() - started
        metrics.ROUNDS.labels(engine_id, "ok").inc()
        metrics.ROUND_SECONDS.observe(seconds)
        metrics.PUBLISH_TO_SERVING_SECONDS.observe(max(0.0, self._wall_clock() - manifest.created_s))
        log.info("engine serves", engine=engine_id, version=version, seconds=round(seconds, 4), worst=verified.worst)
        await self._fleet.servings.note(engine_id, manifest)
        await asyncio.to_thread(store.release, self.loading)

    def _mode(self, version: str) -> PauseMode:
        newer = version > max(self.facts.verified, default="")
        forward = self.facts.state is EngineState.SERVING and not self._undefined and newer
        return self._settings.mode if forward or self._settings.mode is not PauseMode.IN_PLACE else PauseMode.RETRACT

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
        self._times_given_up.pop(manifest.version, None)
        self._told = ("", "")
        self._left_with(manifest.version)
        self._served_update = manifest.update
        metrics.SERVING_UPDATE.labels(self._engine.engine_id).set(manifest.update)
        self._fleet.proven(verified.evidence)
        await self._write(facts)

    def _measure_lag(self, target: Manifest) -> None:
        if self._served_update is not None:
            metrics.LAG_UPDATES.labels(self._engine.engine_id).set(target.update - self._served_update)

    def _measure_pause(self, timings: RoundTimings) -> None:
        self.last_round = timings
        self._paused_s += timings.paused_s
        engine_id, elapsed_s = self._engine.engine_id, max(self._clock() - self._began, self._paused_s)
        metrics.PAUSE_SECONDS.labels(engine_id).observe(timings.paused_s)
        metrics.PAUSED_RATIO.labels(engine_id).set(self._paused_s / elapsed_s if elapsed_s else 0.0)
        metrics.LOADED_BYTES.labels(engine_id).inc(timings.bytes)

    async def _failed(self, version: str, error: str, *, unproven: bool, refused: bool = False) -> None:
        self._failures[version] = self._failures.get(version, 0) + 1
        if self._told != (version, error):
            attempt = self._failures[version]
            log.error("round failed", engine=self._engine.engine_id, version=version, attempt=attempt, error=error)
        if self._failures[version] >= self._settings.attempts:
            label = await self._label()
            self._give_up(version, error, label, unproven=unproven, refused=refused)
            if label is not None:
                self._left_with(label)
            if unproven:
                self._fleet.failed_verification(version, self._engine.engine_id, error)
        await self._quarantine(error)

    def _give_up(
        self,
        version: str,
        error: str,
        label: str | None,
        *,
        unproven: bool,
        refused: bool = False,
        damaged: bool = False,
    ) -> None:
        self._times_given_up[version] += 1
        later_s = min(2 ** (self._times_given_up[version] - 1), _LATER_MOST) * self._settings.cool_down_s
        self._given_up[version] = _GivenUp(self._clock() + later_s, label or "", unproven, refused, damaged)
        if self._told == (version, error):
            return
        self._told = version, error
        most_s = _LATER_MOST * self._settings.cool_down_s
        log.warning(
            "given up for now, tried again later and later; not said again while the error is the same",
            engine=self._engine.engine_id,
            version=version,
            error=error,
            next_in_s=later_s,
            at_most_s=most_s,
        )

    def _left_with(self, label: str) -> None:
        """A later attempt with another version changes the label, too; only what we did not do is a restart."""
        for given_up in self._given_up.values():
            given_up.label = label

    async def _quarantine(self, error: str) -> None:
        self._undefined = True
        now = self._wall_clock()
        facts = {"state": EngineState.QUARANTINED, "error": error, "doubted_s": now, "since_s": now}
        await self._write(self.facts.model_copy(update=facts))

    async def _enter(self, state: EngineState, version: str) -> None:
        facts = {"state": state, "version": version, "since_s": self._wall_clock()}
        await self._write(self.facts.model_copy(update=facts))

    async def _write(self, facts: EngineFacts) -> None:
        self.facts = facts = facts.model_copy(update={"epoch": self._fleet.epoch})
        self._fleet.stands(facts)
        self._unwritten = True  # until the board has it: the next step writes it again
        for state in EngineState:
            metrics.ENGINE_STATE.labels(self._engine.engine_id, state.value).set(float(state is facts.state))
        await self._fleet.board.write_engine(facts)
        self._unwritten = False
