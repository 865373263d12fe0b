"""In-memory twin of an engine, with the odd behaviours of the real one.

It reads real checkpoint directories: its log-probs are a hash of the tensors it holds and of the prefix, so half a
load or a stale cache changes them, as it would on a server. `checkpoint_logprobs` is the oracle for a directory.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sao.weights.checkpoint import describe_tensors, first_non_finite
from services.weights.engines.base import (
    EngineRefusedError,
    EngineUnreachableError,
    GeneratedToken,
    ModelInfo,
    PauseMode,
    UnusableAnswerError,
    UpdatedButNotFlushedError,
)


def _tensors(directory: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    return {entry.name: (tuple(entry.shape), entry.sha256) for entry in describe_tensors(directory)}


def _is_directory(path: Path) -> bool:
    return path.is_dir()


def _logprob(weights: str, prefix: Sequence[int], token: int) -> float:
    digest = hashlib.sha256(f"{weights}|{list(prefix)}|{token}".encode()).digest()
    return -0.1 - 8.0 * int.from_bytes(digest[:4], "big") / 2**32


def _fingerprint(tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> str:
    return hashlib.sha256(repr(sorted(tensors.items())).encode()).hexdigest()


def checkpoint_logprobs(directory: Path, token_ids: Sequence[int]) -> list[float]:
    """What a twin that holds exactly this checkpoint scores."""
    weights = _fingerprint(_tensors(directory))
    return [_logprob(weights, token_ids[:at], token_ids[at]) for at in range(1, len(token_ids))]


@dataclass
class Faults:
    """What goes wrong from now on; change it at any time."""

    unreachable: bool = False
    hang: Collection[str] = ()
    """Steps that never answer (by name: pause, load, flush, checksums, resume, score, generate, model_info)."""
    refuse: Collection[str] = ()
    """Steps answered with 400."""
    ignore_load: bool = False
    """200 and the new label, with the old weights."""
    scramble_load: bool = False
    """200 and the new label, with other weights: a transposed or mixed-up layout."""
    keep_cache: bool = False
    """The flush says yes and does nothing."""
    ignore_salt: bool = False
    """The prefix cache has one namespace, whatever is asked."""
    refuse_versions: Collection[str] = ()
    """Versions whose load is answered with 400."""
    overflow_versions: Collection[str] = ()
    """Versions whose weights are finite, and whose log-probs are not."""
    not_flushed_loads: int = 0
    """That many loads answer 400 "Weights were updated" with the new weights live and the old label."""


@dataclass
class MemoryEngine:
    """One engine that starts from a checkpoint directory; `calls` is the order of the control steps it took."""

    engine_id: str
    checkpoint: Path
    deadline_s: float = 1.0
    label: str = "initial"
    release: str = "0.5.23"
    faults: Faults = field(default_factory=Faults)
    calls: list[str] = field(default_factory=list)
    pauses: list[PauseMode] = field(default_factory=list)
    """How it was paused, each time."""

    def __post_init__(self) -> None:
        self.url = f"memory://{self.engine_id}"
        self.restart()

    def restart(self) -> None:
        """A new process: launch checkpoint, launch label, empty cache, not paused."""
        self._tensors = _tensors(self.checkpoint)
        self._version = self._token_version = self.label
        self._path = self.checkpoint
        self._nan = False
        self._alive = True
        self._cache: dict[tuple[str, tuple[int, ...]], str] = {}
        self._running = asyncio.Event()
        self._running.set()

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    async def model_info(self) -> ModelInfo:
        await self._enter("model_info")
        return ModelInfo(self._version, str(self._path))

    async def server_release(self) -> str:
        await self._enter("release")
        return self.release

    async def pause(self, mode: PauseMode = PauseMode.RETRACT) -> None:
        await self._enter("pause")
        self.pauses.append(mode)
        self._running.clear()

    async def load(self, path: Path, version: str, *, flush: bool = True) -> None:
        await self._enter("load")
        if not _is_directory(path):
            raise EngineRefusedError(self.engine_id, "load", 400, f"Failed to get model config: {path} not found")
        if version in self.faults.refuse_versions:
            raise EngineRefusedError(self.engine_id, "load", 400, f"cannot load {version}")
        found = _tensors(path)
        for name, (shape, _) in found.items():
            if name in self._tensors and self._tensors[name][0] != shape:
                self._alive = False
                raise EngineUnreachableError(self.engine_id, "load", f"connection reset ({name} has another shape)")
        if self.faults.scramble_load:
            found = {name: (shape, f"scrambled-{digest}") for name, (shape, digest) in found.items()}
        if not self.faults.ignore_load:
            self._tensors.update({name: entry for name, entry in found.items() if name in self._tensors})
            self._nan = first_non_finite(path) is not None or version in self.faults.overflow_versions
        self._token_version, self._path = version, path
        if self.faults.not_flushed_loads > 0:
            self.faults.not_flushed_loads -= 1
            text = "Weights were updated, but the cache was not flushed."
            raise UpdatedButNotFlushedError(self.engine_id, "load", 400, text)
        self._version = version
        if flush:
            self._drop_cache()

    async def flush(self) -> None:
        await self._enter("flush")
        self._drop_cache()

    async def checksums(self) -> Mapping[str, str]:
        await self._enter("checksums")
        return {f"rank0/{name}": digest[:16] for name, (_, digest) in self._tensors.items()}

    async def resume(self) -> None:
        await self._enter("resume")
        self._running.set()

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        await self._enter("score")
        await self._until_running("score")
        self._refuse_nan("score")
        weights = _fingerprint(self._tensors)
        return [[_logprob(weights, ids[:at], ids[at]) for at in range(1, len(ids))] for ids in sequences]

    async def generate_one(self, token_ids: Sequence[int], *, salt: str = "") -> GeneratedToken:
        await self._enter("generate")
        await self._until_running("generate")
        self._refuse_nan("generate")
        prompt = tuple(token_ids)
        key = ("" if self.faults.ignore_salt else salt, prompt)
        cached = key in self._cache
        weights = self._cache.setdefault(key, _fingerprint(self._tensors))
        logprob = _logprob(weights, prompt, prompt[0])
        return GeneratedToken(prompt[0], logprob, len(prompt) - 1 if cached else 0, self._token_version)

    async def close(self) -> None:
        """Nothing to give back."""

    def _drop_cache(self) -> None:
        if not self.faults.keep_cache:
            self._cache.clear()

    def _refuse_nan(self, step: str) -> None:
        if self._nan:
            raise UnusableAnswerError(self.engine_id, step, "log-prob None, expected a number (NaN weights?)")

    async def _enter(self, step: str) -> None:
        self.calls.append(step)
        if self.faults.unreachable or not self._alive:
            raise EngineUnreachableError(self.engine_id, step, "connection refused")
        if step in self.faults.hang:
            await self._wait_for(asyncio.Event(), step)
        if step in self.faults.refuse:
            raise EngineRefusedError(self.engine_id, step, 400, f"{step} refused")

    async def _until_running(self, step: str) -> None:
        await self._wait_for(self._running, step)

    async def _wait_for(self, event: asyncio.Event, step: str) -> None:
        try:
            async with asyncio.timeout(self.deadline_s):
                await event.wait()
        except TimeoutError as error:
            raise EngineUnreachableError(self.engine_id, step, f"no answer within {self.deadline_s} s") from error
