"""From a version's commit until an engine serves it, beside the least it could take: a copy, and a plain reload.

Everything is measured in one run, on one engine and one model of a hundred million parameters, version by version.

`floor` is what the engine alone takes of it for its load, its checksums and the canary, of the same copy and reload: no
service that keeps these proofs is faster, whatever else it saves.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import statistics
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

import sao.board
from bench.weights.fleet import perturbed
from bench.weights.models import make_large_checkpoint
from sao.board.base import Board
from sao.config import RunConfig, dump_run_config, load_run_config
from sao.weights.checkpoint import describe_tensors
from sao.weights.filesystem import FileSystemVersionStore
from sao.weights.manifest import CanarySequence, Manifest
from tests.chaos.proxy import Proxies, Watcher
from tests.support.engine import EngineServer, engine_server
from tests.support.engine_logprobs import transformers_logprobs
from tests.support.processes import free_port
from tests.support.services import service
from tests.support.valkey import valkey
from tests.support.versions import CANARY, announce, manifest_for
from tests.support.waiting import eventually

PUBLISHES = 7
WARM = 2
"""Publications that are not counted: caches, pools, the first layout."""
SYNC_RATIO, PAUSE_SHARE = 1.5, 0.25
ENGINES_OWN = ("load", "checksums", "canary")
"""Steps in which the service waits for the engine to load, or to prove what it has loaded."""
PAUSED, RESUMED = b"Generation paused", b"Generation continued"
"""What the engine answers."""


@dataclass(frozen=True)
class Measurement:
    """Seconds of one publication."""

    write: float
    """The trainer's: files and checksums, before the commit."""
    commit: float
    """fsync and rename."""
    sync: float
    """From the commit until the board says that the engine serves."""
    pause: float
    """Between the engine's two answers, as they pass on the wire."""
    steps: Mapping[str, float]
    """Of the round, by the service's own metric."""
    copy: float
    """The same bytes, copied."""
    reload: float
    """The same directory, loaded by a plain request."""

    @property
    def ratio(self) -> float:
        """Of the sync to the least it could take."""
        return self.sync / (self.copy + self.reload)

    @property
    def engine(self) -> float:
        """Seconds of the sync that are the engine's own, and a proof or the load."""
        return sum(self.steps[name] for name in ENGINES_OWN)

    @property
    def floor(self) -> float:
        """Ratio of a sync in which nothing but the engine took time."""
        return self.engine / (self.copy + self.reload)

    @property
    def paused_share(self) -> float:
        """Of the sync."""
        return self.pause / self.sync


class Wire:
    """Sees the engine's answers to the weights service, and how long it was paused between two of them."""

    def __init__(self) -> None:
        self.paused_s = 0.0
        self._since: float | None = None

    def watcher(self) -> Watcher:
        """Of one connection."""
        return self._watch

    def _watch(self, data: bytes) -> None:
        if PAUSED in data:
            self._since = time.monotonic()
        if RESUMED in data and self._since is not None:
            self.paused_s += time.monotonic() - self._since
            self._since = None


class Lab:
    """One engine, the weights service, and who publishes and measures."""

    def __init__(
        self, config: RunConfig, board: Board, server: EngineServer, wire: Wire, *, checkpoint: Path, folder: Path
    ) -> None:
        self._config = config
        self._board = board
        self._server = server
        self._wire = wire
        self._checkpoint = checkpoint
        self._folder = folder
        self._store = FileSystemVersionStore(config.versions_dir, min_free_bytes=0)
        self._published = 0

    async def measure(self) -> Measurement:
        """One version, from its files to the engine, then the copy and the reload of the same files."""
        if self._published == 0:
            await self._board.new_trainer_epoch()
        source = await asyncio.to_thread(
            perturbed, self._checkpoint, self._folder / "source", self._published, share=0.01
        )
        canary = [
            CanarySequence(token_ids=ids, logprobs=row)
            for ids, row in zip(CANARY, await asyncio.to_thread(transformers_logprobs, source, CANARY), strict=True)
        ]
        started = time.monotonic()
        manifest, directory = await asyncio.to_thread(self._write, source, canary)
        written = time.monotonic()
        path = await asyncio.to_thread(self._store.commit, manifest, directory)
        committed, committed_s = time.monotonic(), time.time()
        before, paused_s = await self._steps(), self._wire.paused_s
        await announce(self._board, manifest)
        served_s = await self._served(manifest.version)
        after = await self._steps()
        steps = {name: round(after[name] - before.get(name, 0.0), 4) for name in after}
        copied = await asyncio.to_thread(self._copy, path)
        reloaded = await self._reload(path, manifest.version)
        shutil.rmtree(source)
        return Measurement(
            write=written - started,
            commit=committed - written,
            sync=served_s - committed_s,
            pause=self._wire.paused_s - paused_s,
            steps=steps,
            copy=copied,
            reload=reloaded,
        )

    def _write(self, source: Path, canary: list[CanarySequence]) -> tuple[Manifest, Path]:
        version, directory = self._store.allocate()
        for file in sorted(source.iterdir()):
            shutil.copy(file, directory)
        made = manifest_for(version, directory, update=self._published).model_copy(update={"canary": canary})
        self._published += 1
        return made, directory

    async def _served(self, version: str) -> float:
        """Unix time at which the service said so."""
        found: list[float] = []

        async def said() -> bool:
            facts = (await self._board.engines()).get("engine-0")
            if facts is None or not facts.in_rotation or facts.version != version:
                return False
            found.append(facts.since_s)
            return True

        await eventually(said, what=f"{version} to be served", timeout_s=120, poll_s=0.01)
        return found[0]

    async def _steps(self) -> dict[str, float]:
        """Seconds that rounds have spent in each step so far."""
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"http://127.0.0.1:{self._config.weights.port}/metrics", timeout=10)).text
        found = re.findall(r'^sao_weights_step_seconds_sum\{step="(\w+)"\} (\S+)$', text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def _copy(self, path: Path) -> float:
        target = self._folder / "copy"
        started = time.monotonic()
        shutil.copytree(path, target)
        taken = time.monotonic() - started
        shutil.rmtree(target)
        return taken

    async def _reload(self, path: Path, version: str) -> float:
        """By the same label, so that the service sees nothing of it."""
        request = {"model_path": str(path), "weight_version": version, "flush_cache": True}
        async with httpx.AsyncClient(base_url=self._server.url, timeout=120) as http:
            (await http.post("/pause_generation", json={"mode": "retract"})).raise_for_status()
            started = time.monotonic()
            (await http.post("/update_weights_from_disk", json=request)).raise_for_status()
            taken = time.monotonic() - started
            (await http.post("/continue_generation", json={})).raise_for_status()
        return taken


def medians(measured: Sequence[Measurement]) -> dict[str, float]:
    """Of every number of the publications that count."""
    names = ("write", "commit", "sync", "pause", "copy", "reload", "engine", "ratio", "floor", "paused_share")
    found = {name: statistics.median(getattr(one, name) for one in measured) for name in names}
    steps = {f"step {name}": statistics.median(one.steps[name] for one in measured) for name in measured[0].steps}
    return {name: round(value, 4) for name, value in {**found, **steps}.items()}


def judge(measured: Sequence[Measurement]) -> dict[str, Any]:
    """The medians against the bars."""
    found = medians(measured)
    problems = []
    if found["ratio"] > SYNC_RATIO:
        alone = f"the engine's own {', '.join(ENGINES_OWN)} alone take {found['floor']}"
        problems.append(f"sync takes {found['ratio']} of copy and reload, allowed {SYNC_RATIO}; {alone}")
    if found["paused_share"] > PAUSE_SHARE:
        problems.append(f"the pause is {found['paused_share']} of the sync, allowed {PAUSE_SHARE}")
    return {"passed": not problems, "problems": problems, "medians": found}


async def _run(folder: Path, url: str, server: EngineServer, checkpoint: Path) -> list[Measurement]:
    wire, proxies = Wire(), Proxies()
    try:
        port = proxies.link(server.port, wire.watcher).port
        return await _measured(_config(folder, url, port), server, wire, checkpoint=checkpoint, folder=folder)
    finally:
        proxies.close()


def _config(folder: Path, url: str, port: int) -> RunConfig:
    sets = [
        f"run.name=sync-{uuid.uuid4().hex[:12]}",
        f'run.dir="{folder / "run"}"',
        f'redis.url="{url}"',
        f'engine.urls=["http://127.0.0.1:{port}"]',
        f"weights.port={free_port()}",
    ]
    return load_run_config(None, sets, env={})


async def _measured(
    config: RunConfig, server: EngineServer, wire: Wire, *, checkpoint: Path, folder: Path
) -> list[Measurement]:
    run_file = folder / "run.toml"
    run_file.write_text(dump_run_config(config))
    with service("services.weights", config.weights.port, config, run_file, folder / "weights.log"):
        board = sao.board.connect(config)
        try:
            lab = Lab(config, board, server, wire, checkpoint=checkpoint, folder=folder)
            return [await lab.measure() for _ in range(WARM + PUBLISHES)][WARM:]
        finally:
            await board.close()


def prove(folder: Path) -> dict[str, Any]:
    """The large model on one engine."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    checkpoint = make_large_checkpoint(folder / "checkpoint")
    tensors = describe_tensors(checkpoint)
    with valkey(folder) as url, engine_server(checkpoint, folder) as server:
        measured = asyncio.run(_run(folder, url, server, checkpoint))
    parameters = sum(_size(tensor.shape) for tensor in tensors)
    return {**judge(measured), "parameters": parameters, "samples": [asdict(one) for one in measured]}


def _size(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
