"""Real engines under continuous generation while versions are published, one engine killed and one stopped on the way.

    publisher ─▶ store, board ─▶ weights service ─▶ engines ─▶ episodes (services/rollout) ─▶ samples

The witness reads the board and keeps which versions it called verified on which engine. Afterwards transformers says,
for every sampled token, what the version that the engine named for it gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import sao.board
from sao.board.base import Board, EngineState
from sao.config import RunConfig, dump_run_config, load_run_config
from sao.preference import PreferenceDocument
from sao.tasks.base import Episode, Observation, Prompt, Task
from sao.tokenizer import Tokenizer
from sao.v1 import ingest_pb2
from sao.v1 import trajectory_pb2 as pb
from sao.weights.filesystem import FileSystemVersionStore
from sao.weights.manifest import Manifest
from services.rollout.engines.base import EngineError
from services.rollout.engines.sglang import SGLangEngine
from services.rollout.episode import EpisodeLimits, EpisodeRunner
from services.rollout.rotation import Rotation
from tests.support.engine import EngineServer, engine_server
from tests.support.engine_logprobs import transformers_logprobs
from tests.support.processes import free_port
from tests.support.services import service
from tests.support.tiny_checkpoint import make_tiny_checkpoint
from tests.support.valkey import valkey
from tests.support.versions import announce, publish_checkpoint
from tests.support.waiting import eventually

VOCABULARY, NEW_TOKENS = 32, 64
TOLERANCE = 1e-4
"""Nats between what an engine said of a token and what the version that it named gives, in float32."""
APART = 1e-2
"""Median nats between two versions at least, for the comparison to tell them apart."""
CLIENTS_PER_ENGINE = 4
PER_VERSION = 6
"""Trajectories at least before the next version."""
ENDS_WITHIN_S = 180.0
"""A trajectory that is not there by then is lost."""
SERVES_WITHIN_S = 120.0


@dataclass(frozen=True)
class Sample:
    """One trajectory: a prompt and what one engine sampled after it."""

    ordinal: int
    engine_id: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[tuple[str, int, int]]
    """Version, first token and the one after the last."""


@dataclass(frozen=True)
class Faults:
    """At which publication the second engine is killed, and the third stopped; None: never."""

    kill_at: int | None = None
    stop_at: int | None = None


class _Say:
    """One action without an end in sight, after a prompt of its own."""

    name = "say"
    prompts_path = heldout_prompts_path = Path("/nonexistent")
    default_preference = PreferenceDocument(name="say", weights={"said": 1.0})
    components = frozenset({"said"})

    def __init__(self) -> None:
        self.stop_token_ids: list[int] = []
        self.task_payload: Mapping[str, object] = {}

    def episode(self, prompt: Prompt, _tokenizer: Tokenizer) -> Episode:
        return cast("Episode", _Saying([int(word) for word in prompt.text.split()]))


@dataclass(frozen=True)
class _Saying:
    prompt_token_ids: list[int]
    stop_token_ids: list[int] = field(default_factory=list)
    task_payload: Mapping[str, object] = field(default_factory=dict)

    def observe(self, _action_token_ids: Sequence[int]) -> Observation:
        return Observation([], done=True)


def _prompt(ordinal: int) -> Prompt:
    rng = random.Random(ordinal)
    ids = [1, *(rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(3, 12)))]
    return Prompt(f"p{ordinal}", " ".join(map(str, ids)), {})


class Rollouts:
    """Episodes without a pause, each played until it ends, with a new attempt after every turn that failed."""

    def __init__(self, rotation: Rotation, turn_timeout_s: float) -> None:
        limits = EpisodeLimits(max_turns=1, max_new_tokens=NEW_TOKENS, max_tokens=96, turn_timeout_s=turn_timeout_s)
        self._runner = EpisodeRunner(
            run="fleet",
            worker_id="worker-0",
            task=cast("Task", _Say()),
            tokenizer=cast("Tokenizer", None),
            prompt_of=_prompt,
            rotation=rotation,
            limits=limits,
        )
        self._ordinals = itertools.count()
        self.samples: list[Sample] = []
        self.begun: set[int] = set()
        self.failed: Counter[str] = Counter()

    async def play(self, stop: asyncio.Event) -> None:
        """One episode after the other until told to stop; the last one ends too."""
        while not stop.is_set():
            await self._episode(next(self._ordinals))

    async def _episode(self, ordinal: int) -> None:
        self.begun.add(ordinal)
        lease = ingest_pb2.PromptLease(ordinal=ordinal, lease_id=uuid.uuid4().hex)
        deadline = time.monotonic() + ENDS_WITHIN_S
        for attempt in itertools.count():
            try:
                request = await self._runner.play(lease, attempt)
            except EngineError as error:
                self.failed[error.kind] += 1
                if time.monotonic() > deadline:
                    return
                await asyncio.sleep(0.1)
            else:
                self.samples.append(_sample(ordinal, request.trajectory))
                return


def _sample(ordinal: int, trajectory: pb.Trajectory) -> Sample:
    (action,) = trajectory.segments
    return Sample(
        ordinal=ordinal,
        engine_id=trajectory.engine_id,
        prompt=list(trajectory.prompt_token_ids),
        tokens=list(action.token_ids),
        logprobs=list(action.logprobs),
        spans=[(span.version, span.start, span.end) for span in action.versions],
    )


class Publisher:
    """A trainer as far as the weights service can tell: every version is another, near the one it comes from."""

    def __init__(self, base: Path, store: FileSystemVersionStore, board: Board, folder: Path) -> None:
        self._base = base
        self._store = store
        self._board = board
        self._folder = folder
        self.sources: dict[str, Path] = {}
        """A copy of every version, which the store may have collected since."""

    async def publish(self) -> Manifest:
        """The next version, announced."""
        update = len(self.sources)
        if update == 0:
            await self._board.new_trainer_epoch()
        source = await asyncio.to_thread(perturbed, self._base, self._folder / f"source-{update}", update)
        manifest = await asyncio.to_thread(publish_checkpoint, self._store, source, _logprobs, update=update)
        self.sources[manifest.version] = source
        await announce(self._board, manifest)
        return manifest


def _logprobs(checkpoint: Path, ids: Sequence[int]) -> list[float]:
    return transformers_logprobs(checkpoint, [list(ids)])[0]


def perturbed(base: Path, folder: Path, seed: int, share: float = 0.1) -> Path:
    """A copy of a checkpoint whose matrices have noise of this share of their own deviation."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(base / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() >= 2:
            tensors[name] = tensor + share * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Witness:
    """What the board said of the engines, looked at again and again."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.verified: dict[str, set[str]] = {}
        self.errors: dict[str, set[str]] = {}

    async def look(self) -> None:
        """Once; the board keeps an engine's last 16 versions, so no look comes too late."""
        for engine_id, facts in (await self._board.engines()).items():
            self.verified.setdefault(engine_id, set()).update(facts.verified)
            if facts.state is EngineState.QUARANTINED:
                self.errors.setdefault(engine_id, set()).add(facts.error)

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(0.05)


@dataclass
class Fleet:
    """Everything that runs."""

    config: RunConfig
    servers: Sequence[EngineServer]
    board: Board
    publisher: Publisher
    rollouts: Rollouts
    witness: Witness
    down: set[str] = field(default_factory=set)
    """Engines that a fault keeps from serving."""

    async def serves(self, version: str) -> None:
        """Wait until every engine that can says so."""

        async def said() -> bool:
            facts = await self.board.engines()
            names = {f"engine-{number}" for number in range(len(self.servers))} - self.down
            return all(name in facts and facts[name].in_rotation and facts[name].version == version for name in names)

        await eventually(said, what=f"{version} on all but {self.down}", timeout_s=SERVES_WITHIN_S, poll_s=0.05)

    async def sampled(self, count: int) -> None:
        """Wait for so many more trajectories."""
        wanted = len(self.rollouts.samples) + count
        await eventually(
            lambda: len(self.rollouts.samples) >= wanted, what=f"{count} trajectories", timeout_s=SERVES_WITHIN_S
        )

    async def out_of_rotation(self, engine_id: str) -> float:
        """Seconds until the board says so of an engine that has just failed."""
        started = time.monotonic()

        async def out() -> bool:
            return (await self.board.engines())[engine_id].state is EngineState.QUARANTINED

        await eventually(out, what=f"{engine_id} out of rotation", timeout_s=SERVES_WITHIN_S, poll_s=0.02)
        return round(time.monotonic() - started, 2)

    async def kill(self, number: int) -> float:
        """SIGKILL, and a new start at once."""
        engine_id = f"engine-{number}"
        self.down.add(engine_id)
        await asyncio.to_thread(self.servers[number].kill)
        out_s = await self.out_of_rotation(engine_id)
        await asyncio.to_thread(self.servers[number].start)
        self.down.discard(engine_id)
        return out_s

    async def stop(self, number: int) -> float:
        """SIGSTOP, until it is out of rotation and the others have taken another version."""
        engine_id = f"engine-{number}"
        self.down.add(engine_id)
        self.servers[number].signal(signal.SIGSTOP)
        try:
            out_s = await self.out_of_rotation(engine_id)
            await self.sampled(5 * PER_VERSION)
        finally:
            self.servers[number].signal(signal.SIGCONT)
        self.down.discard(engine_id)
        return out_s


@contextlib.asynccontextmanager
async def running(
    folder: Path, valkey_url: str, servers: Sequence[EngineServer], checkpoint: Path
) -> AsyncIterator[Fleet]:
    """The weights service as its own process, the clients and the witness in this one."""
    config = _config(folder, valkey_url, servers)
    run_file = folder / "run.toml"
    run_file.write_text(dump_run_config(config))
    engines = {
        f"engine-{number}": SGLangEngine(f"engine-{number}", server.url, VOCABULARY)
        for number, server in enumerate(servers)
    }
    with service("services.weights", config.weights.port, config, run_file, folder / "weights.log"):
        board = sao.board.connect(config)
        rotation, witness = Rotation(board, engines), Witness(board)
        store = FileSystemVersionStore(config.versions_dir, min_free_bytes=0)
        background = [asyncio.create_task(rotation.run()), asyncio.create_task(witness.watch())]
        try:
            publisher = Publisher(checkpoint, store, board, folder)
            rollouts = Rollouts(rotation, config.rollout.turn_timeout_s)
            yield Fleet(config, servers, board, publisher, rollouts, witness)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            for engine in engines.values():
                await engine.close()
            await board.close()


def _config(folder: Path, valkey_url: str, servers: Sequence[EngineServer]) -> RunConfig:
    sets = [
        f"run.name=fleet-{uuid.uuid4().hex[:12]}",
        f'run.dir="{folder / "run"}"',
        f'redis.url="{valkey_url}"',
        f"engine.urls={json.dumps([server.url for server in servers])}",
        f"weights.port={free_port()}",
        "weights.step_timeout_s=10",
        "rollout.turn_timeout_s=20",
    ]
    return load_run_config(None, sets, env={})


async def publish_under_load(fleet: Fleet, publishes: int, faults: Faults) -> dict[str, Any]:
    """Publish so many versions while the clients play; what the faults led to."""
    stop, found = asyncio.Event(), {}
    clients: list[asyncio.Task[None]] = []
    pending: dict[str, asyncio.Task[float]] = {}
    async with asyncio.TaskGroup() as group:
        for number in range(publishes):
            manifest = await fleet.publisher.publish()
            if number == 0:
                await fleet.serves(manifest.version)
                clients += [
                    group.create_task(fleet.rollouts.play(stop)) for _ in range(CLIENTS_PER_ENGINE * len(fleet.servers))
                ]
                await fleet.sampled(PER_VERSION)
            if number == faults.kill_at:
                pending["killed"] = group.create_task(fleet.kill(1))
            if number == faults.stop_at:
                if "killed" in pending:
                    await pending["killed"]
                pending["stopped"] = group.create_task(fleet.stop(2))
            await fleet.serves(manifest.version)
            await fleet.sampled(PER_VERSION)
        for name, task in pending.items():
            found[name] = await task
        await fleet.serves(manifest.version)
        await fleet.sampled(PER_VERSION * len(fleet.servers))
        stop.set()
        await asyncio.gather(*clients)
    await fleet.witness.look()
    return {"out_of_rotation_after_s": found}


# --- the judgement --------------------------------------------------------------------------------------------


def unverified(samples: Sequence[Sample], verified: Mapping[str, set[str]]) -> list[str]:
    """Trajectories with a token of a version that its engine had not been verified to serve."""
    return [
        f"trajectory {sample.ordinal}: {version} is not verified on {sample.engine_id}"
        for sample in samples
        for version, _, _ in sample.spans
        if version not in verified.get(sample.engine_id, set())
    ]


def uncovered(samples: Sequence[Sample]) -> list[str]:
    """Trajectories with a token that no version is named for."""
    return [
        f"trajectory {sample.ordinal}: spans {sample.spans} for {len(sample.tokens)} tokens"
        for sample in samples
        if [at for _, start, end in sample.spans for at in range(start, end)] != list(range(len(sample.tokens)))
    ]


def lost(begun: set[int], samples: Sequence[Sample]) -> list[str]:
    """Episodes that did not end with one trajectory."""
    ended = Counter(sample.ordinal for sample in samples)
    return [
        f"episode {ordinal} ended with {ended[ordinal]} trajectories"
        for ordinal in sorted(begun)
        if ended[ordinal] != 1
    ]


def differences(samples: Sequence[Sample], sources: Mapping[str, Path], shift: int = 0) -> list[float]:
    """For every token |engine - transformers| under the version named for it, or the one published `shift` later."""
    names = list(sources)
    found: list[float] = []
    for number, name in enumerate(names):
        mine = [(sample, span) for sample in samples for span in sample.spans if span[0] == name]
        model = sources[names[(number + shift) % len(names)]]
        scored = transformers_logprobs(model, [[*sample.prompt, *sample.tokens] for sample, _ in mine])
        for (sample, (_, start, end)), row in zip(mine, scored, strict=True):
            expected = row[len(sample.prompt) - 1 :]
            found += [abs(sample.logprobs[at] - expected[at]) for at in range(start, end)]
    return found


def judge(fleet: Fleet) -> dict[str, Any]:
    """Everything that was promised, and whether it could have been seen if it were not so."""
    samples, sources = fleet.rollouts.samples, fleet.publisher.sources
    problems = [
        *unverified(samples, fleet.witness.verified),
        *uncovered(samples),
        *lost(fleet.rollouts.begun, samples),
    ]
    named = {version for sample in samples for version, _, _ in sample.spans}
    problems += [f"tokens of {version}, which was never published" for version in sorted(named - sources.keys())]
    true = differences(samples, sources)
    wrong = statistics.median(differences(samples, sources, shift=1))
    if max(true) > TOLERANCE:
        beyond = sum(value > TOLERANCE for value in true)
        problems.append(f"{beyond} of {len(true)} log-probs differ by up to {max(true):.3g}, allowed {TOLERANCE}")
    if wrong < APART:
        problems.append(f"the next version's log-probs differ by {wrong:.3g} in the median: too near to tell apart")
    log = (fleet.config.run.dir.parent / "weights.log").read_text()
    if "Traceback" in log:
        problems.append("a traceback in weights.log")
    return {
        "passed": not problems,
        "problems": problems[:50],
        "versions": len(sources),
        "versions_sampled": len(named),
        "trajectories": len(samples),
        "by_engine": dict(sorted(Counter(sample.engine_id for sample in samples).items())),
        "tokens": len(true),
        "trajectories_of_two_versions": sum(len(sample.spans) > 1 for sample in samples),
        "attempts_failed": dict(fleet.rollouts.failed),
        "verified": {name: len(found) for name, found in sorted(fleet.witness.verified.items())},
        "said": {name: sorted(found) for name, found in sorted(fleet.witness.errors.items())},
        "largest_difference": max(true),
        "median_difference_to_the_next_version": wrong,
    }


async def prove_on(
    folder: Path,
    valkey_url: str,
    servers: Sequence[EngineServer],
    checkpoint: Path,
    *,
    publishes: int,
    faults: Faults,
) -> dict[str, Any]:
    """Run, then judge."""
    started = time.monotonic()
    async with running(folder, valkey_url, servers, checkpoint) as fleet:
        found = await publish_under_load(fleet, publishes, faults)
        seconds = round(time.monotonic() - started, 1)
    return {**judge(fleet), **found, "seconds": seconds}


@contextlib.contextmanager
def started(folder: Path, engines: int) -> Iterator[tuple[str, list[EngineServer], Path]]:
    """A Valkey's URL, so many engines and the tiny checkpoint that they start from, in an empty folder."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    checkpoint = make_tiny_checkpoint(folder / "seed0", 0)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(valkey(folder))
        servers = []
        for number in range(engines):
            (folder / f"engine-{number}").mkdir()
            servers.append(stack.enter_context(engine_server(checkpoint, folder / f"engine-{number}")))
        yield url, servers, checkpoint


def prove(folder: Path) -> dict[str, Any]:
    """Three engines, 50 versions, one engine killed and one stopped."""
    faults = Faults(kill_at=8, stop_at=30)
    with started(folder, engines=3) as (url, servers, checkpoint):
        found = asyncio.run(prove_on(folder, url, servers, checkpoint, publishes=50, faults=faults))
    struck = found["out_of_rotation_after_s"]
    missing = [f"no engine was {what}" for what in ("killed", "stopped") if what not in struck]
    return {**found, "passed": found["passed"] and not missing, "problems": [*found["problems"], *missing]}
