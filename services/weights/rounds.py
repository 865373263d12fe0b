"""One round: bring one engine from whatever it serves to one version, and prove it.

    serving ─▶ quiescing ─▶ quiesced ─▶ loading ─▶ verifying ─▶ serving
                    └────────────┴──────────┴───────────┴─────▶ quarantined

Each arrow is a function that takes the proof of the state before it, so loading can't be written without an
acknowledged quiesce. The pause covers the load and nothing else: the files were read before it (staging.py), and every
proof comes after it. A paused engine scores nothing anyway; it is still out of rotation then, and workers withhold what
turns resumed meanwhile produce.

Where running requests keep their keys and values (`PauseMode.IN_PLACE`) nothing is flushed. New requests then read only
what was cached under their version's own salt, and the probe proves that: it was cached under the version from before.

No `flush_cache` call on the good path: the load itself flushes and says so (a server that could not answers 400
"Weights were updated", which is handled), a separate call costs about 0.4 s on the CPU server, and what counts is the
proof: the probe must report no cached token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sao.board.base import EngineState
from sao.telemetry.traces import child
from sao.weights.manifest import Manifest
from services.weights import metrics
from services.weights.canary import CanaryError, Tolerance, differences, probe_prompt
from services.weights.engines.base import (
    EngineControl,
    GeneratedToken,
    ModelInfo,
    PauseMode,
    UnusableAnswerError,
    UpdatedButNotFlushedError,
)

Report = Callable[[EngineState], Awaitable[None]]


class VerificationError(Exception):
    """The engine answered everything and serves something else than the version; says which proof failed."""


@dataclass(frozen=True)
class Evidence:
    """A version some engine has proven to serve, and its parameters' checksums then."""

    manifest: Manifest
    checksums: Mapping[str, str]


@dataclass(frozen=True)
class RoundTimings:
    """What a round that succeeded took, in seconds."""

    staged_s: float
    """Reading and comparing the files, once for all engines, while they served."""
    paused_s: float
    """From asking for the pause until the engine went on: the load is in it."""
    loaded_s: float
    verified_s: float
    """Checksums, canary and probe: out of rotation, but not paused."""
    total_s: float
    """From the probe before the pause until everything was proven; staging and the wait for a slot are before it."""
    bytes: int
    """Size of the version's files."""


@dataclass(frozen=True)
class Primed:
    """The probe prompt is in the prefix cache under the weights from before."""

    probe: list[int]


@dataclass(frozen=True)
class Quiesced:
    """The engine acknowledged the pause: no forward pass runs until it is resumed."""

    primed: Primed
    since: float
    """Monotonic seconds at which it was asked to."""


@dataclass(frozen=True)
class Loaded:
    """The engine said that it loaded, and that it goes on."""

    primed: Primed
    paused_s: float
    loaded_s: float


@dataclass(frozen=True)
class Verified:
    """Every proof held; `worst` is the largest canary difference in nats."""

    evidence: Evidence
    worst: float
    timings: RoundTimings


class Round:
    """One attempt; raises EngineError or VerificationError, and then the engine must not serve."""

    def __init__(
        self,
        engine: EngineControl,
        manifest: Manifest,
        path: Path,
        *,
        evidence: Mapping[str, Evidence],
        tolerance: Tolerance,
        same_dtype: bool,
        report: Report,
        mode: PauseMode = PauseMode.RETRACT,
        replaces: str = "",
        staged_s: float = 0.0,
    ) -> None:
        """`same_dtype`: the engine holds the version's own dtype, so other tensors mean other checksums.

        `replaces`: the version whose salt the probe is cached under, where nothing is flushed (`mode`).
        """
        self._engine = engine
        self._manifest = manifest
        self._path = path
        self._evidence = evidence
        self._tolerance = tolerance
        self._same_dtype = same_dtype
        self._report = report
        self._staged_s = staged_s
        self._mode = mode
        self._flush = mode is not PauseMode.IN_PLACE
        self._salts = ("", "") if self._flush else (replaces, manifest.version)

    async def run(self, *, resume_first: bool) -> Verified:
        """All steps; `resume_first` when an earlier round may have left the engine paused."""
        started = time.monotonic()
        with _timed("prime"):
            primed = await self._prime(resume_first=resume_first)
        quiesced = await self._quiesce(primed)
        loaded = await self._load(quiesced)
        return await self._verify(loaded, started)

    async def _prime(self, *, resume_first: bool) -> Primed:
        if resume_first:
            await self._engine.resume()
        probe = probe_prompt(self._manifest)
        # Weights of NaNs answer null log-probs; the prompt is cached all the same, and they are about to go.
        with suppress(UnusableAnswerError):
            await self._engine.generate_one(probe, salt=self._salts[0])
        return Primed(probe)

    async def _quiesce(self, primed: Primed) -> Quiesced:
        await self._report(EngineState.QUIESCING)
        since = time.monotonic()
        with _timed("pause"):
            await self._engine.pause(self._mode)
        await self._report(EngineState.QUIESCED)
        return Quiesced(primed, since)

    async def _load(self, quiesced: Quiesced) -> Loaded:
        await self._report(EngineState.LOADING)
        started = time.monotonic()
        with _timed("load"):
            try:
                await self._engine.load(self._path, self._manifest.version, flush=self._flush)
            except UpdatedButNotFlushedError:
                # The weights are live, the cache and the reported label are old: once the cache is empty, load again.
                await self._engine.flush()
                await self._engine.load(self._path, self._manifest.version)
        loaded_s = time.monotonic() - started
        await self._report(EngineState.VERIFYING)
        with _timed("resume"):
            await self._engine.resume()
        return Loaded(quiesced.primed, paused_s=time.monotonic() - quiesced.since, loaded_s=loaded_s)

    async def _checksums(self) -> Mapping[str, str]:
        with _timed("checksums"):
            checksums = await self._engine.checksums()
        for known in self._evidence.values():
            self._compare(checksums, known)
        return checksums

    def _compare(self, checksums: Mapping[str, str], known: Evidence) -> None:
        if checksums.keys() != known.checksums.keys():
            return  # another parallel layout: not comparable
        same_tensors = self._manifest.same_weights(known.manifest)
        changed = [name for name in checksums if checksums[name] != known.checksums[name]]
        if same_tensors and changed:
            msg = (
                f"{changed[0]} and {len(changed) - 1} more parameters differ from those verified for "
                f"{known.manifest.version}, which has the same tensors"
            )
            raise VerificationError(msg)
        if not same_tensors and not changed and self._same_dtype:
            msg = f"checksums equal those of {known.manifest.version}, which has other tensors: nothing was loaded"
            raise VerificationError(msg)

    async def _verify(self, loaded: Loaded, began: float) -> Verified:
        started = time.monotonic()
        checksums = await self._checksums()
        sequences = self._manifest.canary
        with _timed("canary"):
            probe = loaded.primed.probe
            fresh_token = self._engine.generate_one(probe, salt=self._salts[1])
            info, token = await asyncio.gather(self._engine.model_info(), fresh_token)
            asked = [*(sequence.token_ids for sequence in sequences), [*probe, token.token_id]]
            *scores, fresh = await self._engine.score(asked)
        try:
            found = [
                difference
                for sequence, score in zip(sequences, scores, strict=True)
                for difference in differences(sequence, score)
            ]
            worst = max(found)
            metrics.CANARY_DIFFERENCE.labels(self._engine.engine_id).set(worst)
            metrics.CANARY_DIFFERENCES.observe(worst)
            self._tolerance.check(found)
            self._check_fresh(token, fresh[-1])
        except CanaryError as error:
            msg = f"canary: {error}"
            raise VerificationError(msg) from error
        self._check_labels(token, info)
        ended = time.monotonic()
        timings = RoundTimings(
            staged_s=self._staged_s,
            paused_s=loaded.paused_s,
            loaded_s=loaded.loaded_s,
            verified_s=ended - started,
            total_s=ended - began,
            bytes=sum(file.size for file in self._manifest.files),
        )
        return Verified(Evidence(self._manifest, checksums), worst, timings)

    def _check_fresh(self, token: GeneratedToken, scored: float) -> None:
        """Prompt scoring bypasses the prefix cache, so only a generated token shows keys and values of old weights."""
        if token.cached_tokens != 0:
            msg = f"stale prefix cache: {token.cached_tokens} tokens of the probe are cached across the update"
            raise VerificationError(msg)
        self._tolerance.check_token(abs(token.logprob - scored))

    def _check_labels(self, token: GeneratedToken, info: ModelInfo) -> None:
        for where, label in (("generated token", token.version), ("model_info", info.weight_version)):
            if label != self._manifest.version:
                msg = f"{where} is labelled {label!r}, expected {self._manifest.version!r}"
                raise VerificationError(msg)


@contextmanager
def _timed(step: str) -> Iterator[None]:
    started = time.monotonic()
    with child("step") as span:
        span.set(step=step)
        yield
    metrics.STEP_SECONDS.labels(step).observe(time.monotonic() - started)
