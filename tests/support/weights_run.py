"""The weights service on a real engine, Valkey and store, with the caller as the trainer, and a witness of its word."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import sao.board
from sao.board.base import Board, EngineFacts
from sao.config import RunConfig, load_run_config
from sao.config.dump import dump_run_config
from sao.endings import end
from sao.weights.filesystem import FileSystemVersionStore
from sao.weights.manifest import Manifest
from services.weights.engines.base import EngineError
from services.weights.engines.sglang import SGLangEngine
from tests.support.engine_logprobs import transformers_logprobs
from tests.support.processes import free_port
from tests.support.steered_weights import HALF, STEER
from tests.support.versions import announce, publish_checkpoint
from tests.support.waiting import eventually

ENGINE_ID = "engine-0"
PROBE = [1, 12, 30, 4, 4, 9]
SERVES_WITHIN_S = 60.0


@functools.cache
def _logprobs(checkpoint: Path, token_ids: tuple[int, ...]) -> list[float]:
    return transformers_logprobs(checkpoint, [list(token_ids)])[0]


def oracle(checkpoint: Path, token_ids: Sequence[int]) -> list[float]:
    """What transformers says, once for each question."""
    return _logprobs(checkpoint, tuple(token_ids))


class WeightsRun:
    """Publishes two checkpoints in turn, so that each version has other weights than the one before."""

    def __init__(self, folder: Path, valkey_url: str, engine_url: str, checkpoints: tuple[Path, Path]) -> None:
        sets = [
            f"run.name=weights-{uuid.uuid4().hex[:12]}",
            f'run.dir="{folder / "run"}"',
            f'redis.url="{valkey_url}"',
            f'engine.urls=["{engine_url}"]',
            f"weights.port={free_port()}",
        ]
        self.config: RunConfig = load_run_config(None, sets, env={})
        self.store = FileSystemVersionStore(self.config.versions_dir, min_free_bytes=0)
        self.published: list[Manifest] = []
        self.sources: dict[str, Path] = {}
        """The checkpoint that a version is a copy of."""
        self.checksums: dict[Path, Mapping[str, str]] = {}
        """Of the engine's parameters when it holds a checkpoint."""
        self.process: subprocess.Popen[bytes] | None = None
        self.half = folder / "half"
        _write_half(checkpoints[1], self.half)
        self.checkpoints = checkpoints
        """The one that the engine is launched from, and another."""
        self._folder = folder
        self._steer = folder / "steer"
        self._steer.write_text("")
        self._run_file = folder / "run.toml"
        self._run_file.write_text(dump_run_config(self.config))
        self._lives = 0

    @property
    def log(self) -> Path:
        """Of the newest life."""
        return self._folder / f"weights-{self._lives}.log"

    @property
    def newest(self) -> Manifest:
        """What was published last."""
        return self.published[-1]

    def order(self, text: str) -> None:
        """What the service does when it comes to a point (steered_weights); nothing: its work."""
        self._steer.write_text(text)

    @property
    def held(self) -> bool:
        """Whether it has come to the point at which it is to stay."""
        return self._steer.read_text().startswith("held")

    @property
    def lives(self) -> bool:
        """Whether the service has been started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def is_launched(self, version: str) -> bool:
        """Whether the version has the weights that the engine starts with."""
        return self.sources[version] == self.checkpoints[0]

    def start(self) -> None:
        """Begin a life of the service."""
        self._lives += 1
        command = [sys.executable, "-m", "tests.support.steered_weights", "--config", str(self._run_file)]
        steered = {**os.environ, STEER: str(self._steer), HALF: str(self.half)}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=steered)

    def kill(self) -> None:
        """End it at once, wherever it is."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)

    async def died(self) -> int:
        """Its exit status, once it has ended."""
        process = self.process
        assert process is not None
        await eventually(lambda: process.poll() is not None, what=f"the service's end, see {self.log}", timeout_s=60)
        return process.wait()


@contextlib.contextmanager
def weights_run(folder: Path, valkey_url: str, engine_url: str, checkpoints: tuple[Path, Path]) -> Iterator[WeightsRun]:
    """A run without a life; one that was begun is ended with the block."""
    run = WeightsRun(folder, valkey_url, engine_url, checkpoints)
    try:
        yield run
    finally:
        run.kill()


def _write_half(checkpoint: Path, directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory.mkdir()
    tensors = load_file(checkpoint / "model.safetensors")
    kept = {name: tensors[name] for name in sorted(tensors)[::2]}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_bytes((checkpoint / "config.json").read_bytes())


class Trainer:
    """Publishes and looks; with clients of one event loop."""

    def __init__(self, run: WeightsRun, board: Board, engine: SGLangEngine) -> None:
        self.run = run
        self.board = board
        self.engine = engine
        self.lies: list[str] = []
        """When the board said that the engine serves a version, and it held other weights or was not there."""

    async def learn_checksums(self) -> None:
        """Load each checkpoint once, to know it by its checksums; the engine must be nobody's."""
        await self.engine.pause()
        for checkpoint in reversed(self.run.checkpoints):
            await self.engine.load(checkpoint, "initial")
            self.run.checksums[checkpoint] = await self.engine.checksums()
        await self.engine.resume()

    async def publish(self) -> Manifest:
        """The next version: the checkpoint that the one before was not."""
        run = self.run
        if not run.published:
            await self.board.new_trainer_epoch()
        update = len(run.published)
        source = run.checkpoints[(update + 1) % 2]
        manifest = publish_checkpoint(run.store, source, oracle, update=update)
        run.published.append(manifest)
        run.sources[manifest.version] = source
        await announce(self.board, manifest)
        return manifest

    async def facts(self) -> EngineFacts:
        """What the board says of the engine."""
        return (await self.board.engines())[ENGINE_ID]

    async def serves(self, version: str, *, since_s: float = 0.0) -> EngineFacts:
        """Wait until the board says so, written after that time."""

        async def said() -> bool:
            found = (await self.board.engines()).get(ENGINE_ID)
            return found is not None and found.in_rotation and found.version == version and found.since_s > since_s

        what = f"{version} to be served, see {self.run.log}"
        await eventually(said, what=what, timeout_s=SERVES_WITHIN_S, poll_s=0.02)
        return await self.facts()

    async def holds(self, version: str) -> bool:
        """Whether the engine's weights are this version's, to the bit."""
        return await self.engine.checksums() == self.run.checksums[self.run.sources[version]]

    async def look(self) -> None:
        """Take the board at its word once: an engine in rotation holds the version that it is said to serve."""
        said = (await self.board.engines()).get(ENGINE_ID)
        if said is None or not said.in_rotation:
            return
        try:
            true = await self.holds(said.version)
        except EngineError as error:
            self.lies.append(f"{said.version} is said to be served, but {error}")
            return
        if not true and await self.facts() == said:
            self.lies.append(f"{said.version} is said to be served, but the weights are others")

    @contextlib.asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        """Look again and again while the block runs."""

        async def forever() -> None:
            while True:
                await self.look()
                await asyncio.sleep(0.02)

        task = asyncio.create_task(forever())
        try:
            yield
        finally:
            await end([task])
            if task.done() and not task.cancelled():
                task.result()


@contextlib.asynccontextmanager
async def trainer(run: WeightsRun) -> AsyncIterator[Trainer]:
    """The run's trainer, as far as the weights service can tell."""
    board = sao.board.connect(run.config)
    engine = SGLangEngine(ENGINE_ID, run.config.engine.urls[0], deadline_s=20.0)
    try:
        yield Trainer(run, board, engine)
    finally:
        await engine.close()
        await board.close()


__all__ = ["PROBE", "Trainer", "WeightsRun", "oracle", "trainer", "weights_run"]
