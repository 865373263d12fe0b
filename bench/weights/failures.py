"""Every way in which a real SGLang server fails at a weight update, in one table, provoked under the service's parts.

A bad version is published twice: preflight must refuse it by itself, and, let through, the proofs of the round must. A
bad engine gets a good version. Either way the service says which engine and why, nothing unproven is ever in rotation,
and the next version serves everywhere. The last two rows are failures that must not matter.

Partial updates (`/begin_weight_update`), update groups and `/health`, which hang or serve a mixture, are not asked for:
`ROUTES` is all that the service asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from sao.board.base import EngineFacts, EngineState
from sao.board.memory import MemoryBoard
from sao.config import load_run_config
from sao.telemetry.health import Health
from sao.weights.base import VersionStore
from sao.weights.filesystem import FileSystemVersionStore
from sao.weights.manifest import Manifest
from services.rollout.engines.base import EngineTimeoutError
from services.rollout.engines.sglang import SGLangEngine as RolloutEngine
from services.weights.app import build_keepers
from services.weights.engines.sglang import SGLangEngine
from services.weights.fleet import Fleet
from services.weights.keeper import Keeper, KeeperSettings
from tests.chaos.proxy import Proxies, Watcher
from tests.support.engine import EngineServer, engine_server
from tests.support.tiny_checkpoint import make_tiny_checkpoint
from tests.support.versions import CANARY, announce, publish_checkpoint
from tests.support.waiting import eventually
from tests.support.weights_run import oracle

ROUTES = {
    "/model_info",
    "/server_info",
    "/pause_generation",
    "/update_weights_from_disk",
    "/flush_cache",
    "/weights_checker",
    "/continue_generation",
    "/generate",
}
IDS = [1, 12, 30, 4, 4, 9]
VOCABULARY = 32
HURRIED_S = 2.0
SETTLED_WITHIN_S = 120.0
Load = Callable[[Path, str], Any]
Tensors = dict[str, Any]


class FaultyEngine(SGLangEngine):
    """The service's own client of one server, which notes what it asks, and loads or pauses otherwise when told to."""

    load_instead: Load | None = None
    pause_mode = "retract"

    def __init__(self, engine_id: str, url: str, *, deadline_s: float) -> None:
        super().__init__(engine_id, url, deadline_s=deadline_s)
        self.asked: set[str] = set()

    async def load(self, path: Path, version: str, **how: Any) -> None:  # noqa: ANN401 - passed on as it came
        """As the service does, or as the failure does."""
        if self.load_instead is not None:
            await self.load_instead(path, version)
        else:
            await super().load(path, version, **how)

    async def load_as_ever(self, path: Path, version: str) -> None:
        """As the service does."""
        await super().load(path, version)

    async def post(self, path: str, body: Mapping[str, object]) -> None:
        """What the service would never ask; not noted."""
        await super()._send("load", "POST", path, headers={}, json=body)

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        """With a deadline that a test can wait for."""
        usual, self._deadline_s = self._deadline_s, HURRIED_S
        try:
            yield
        finally:
            self._deadline_s = usual

    async def _send(
        self, step: str, method: str, path: str, *, headers: Mapping[str, str], json: Mapping[str, object] | None = None
    ) -> httpx.Response:
        self.asked.add(path)
        if path == "/pause_generation":
            json = {"mode": self.pause_mode}
        return await super()._send(step, method, path, headers=headers, json=json)


class RememberingBoard(MemoryBoard):
    """Keeps everything that keepers said."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[EngineFacts] = []

    async def write_engine(self, facts: EngineFacts) -> None:
        """Write it, and keep it."""
        self.told.append(facts)
        await super().write_engine(facts)


@dataclass
class Cut:
    """Ends a connection when an answer that holds `at` would arrive; empty: none."""

    at: bytes = b""

    def watcher(self) -> Watcher:
        """Of one connection."""

        def watch(data: bytes) -> None:
            if self.at and self.at in data:
                raise ConnectionResetError

        return watch


@dataclass
class World:
    """Real servers, the first of which fails, and the parts of the weights service, stepped by the caller."""

    servers: Sequence[EngineServer]
    checkpoints: tuple[Path, Path]
    folder: Path
    proxies: Proxies
    """In front of the first."""
    engines: Sequence[FaultyEngine]
    keepers: Sequence[Keeper]
    fleet: Fleet
    board: RememberingBoard
    store: FileSystemVersionStore
    cut: Cut
    updates: int = 0
    published: dict[str, Path] = field(default_factory=dict)
    """The checkpoint that a version is a copy of."""

    @property
    def engine(self) -> FaultyEngine:
        """The one that fails."""
        return self.engines[0]

    @property
    def server(self) -> EngineServer:
        """What is behind it."""
        return self.servers[0]

    async def publish(
        self, source: Path, *, policy: Path | None = None, canary: Sequence[Sequence[int]] = CANARY
    ) -> Manifest:
        """A copy of `source`, whose trainer has another policy when one is named."""
        if self.board.newest_epoch == 0:
            await self.board.new_trainer_epoch()

        def logprobs(checkpoint: Path, ids: Sequence[int]) -> list[float]:
            known = max(ids) < VOCABULARY
            return oracle(policy or checkpoint, ids) if known else [-1.0] * (len(ids) - 1)

        manifest = publish_checkpoint(self.store, source, logprobs, update=self.updates, canary=canary)
        self.updates += 1
        self.published[manifest.version] = source
        await announce(self.board, manifest)
        await self.fleet.follow()
        return manifest

    async def step_until(self, condition: Callable[[], bool], what: str) -> None:
        """Step every keeper, side by side, until it holds."""

        async def stepped() -> bool:
            await asyncio.gather(*(keeper.step() for keeper in self.keepers))
            return condition()

        await eventually(stepped, what=what, timeout_s=SETTLED_WITHIN_S, poll_s=0.02)

    def serves(self, version: str, keepers: Sequence[Keeper] | None = None) -> bool:
        """Whether all of these keepers say so; all of the fleet when none are named."""
        asked = self.keepers if keepers is None else keepers
        return all(keeper.facts.in_rotation and keeper.facts.version == version for keeper in asked)

    async def running(self) -> int:
        """Requests that the first server works on."""
        async with httpx.AsyncClient(base_url=self.server.url, timeout=20) as http:
            loads = (await http.get("/v1/loads")).json()["loads"]
        return int(loads[0]["num_running_reqs"])

    async def slow_down(self, seconds: float | None) -> None:
        """Let every step of the first server take longer."""
        await self.engine.post("/slow_down", {"forward_sleep_time": seconds})


class Serves(Enum):
    """Which version the first engine serves while the failure lasts."""

    GOOD = "the good version from before"
    NEW = "the new version"
    NOTHING = "nothing: it is out of rotation"


Provoke = Callable[[World], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class Failure:
    """One row: how it is provoked, what the service must say, and what the engine that fails serves meanwhile."""

    name: str
    says: str
    """What the board must have been told of the first engine (regular expression); empty: nothing."""
    serves: Serves
    spoil: Callable[[Tensors], None] | None = None
    """Makes a version's tensors bad."""
    refused: str = ""
    """What preflight says of the version (regular expression)."""
    canary: Sequence[Sequence[int]] = tuple(CANARY)
    other_policy: bool = False
    """The canary is of other weights than the version's."""
    tied: bool = False
    provoke: Provoke | None = None
    ends_engine: bool = False

    @property
    def bad_version(self) -> bool:
        """Whether the version is at fault, and with it every engine."""
        return self.provoke is None


# --- bad versions ---------------------------------------------------------------------------------------------


def _fused(tensors: Tensors) -> None:
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        for number in range(4):
            for part in ("gate_proj", "up_proj", "down_proj"):
                weight = tensors.pop(f"{experts}.{number}.{part}.weight")
                tensors[f"{experts}.gate_up_proj"] = weight


def _unknown(tensors: Tensors) -> None:
    for name in [name for name in tensors if "experts" in name]:
        tensors[name.replace("experts", "expert")] = tensors.pop(name)


def _half(tensors: Tensors) -> None:
    for name in sorted(tensors)[::2]:
        del tensors[name]


def _headless(tensors: Tensors) -> None:
    del tensors["lm_head.weight"]


def _nan(tensors: Tensors) -> None:
    tensors["lm_head.weight"][0, 0] = math.nan


def _narrow(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :-1].clone()


def _as_it_is(_tensors: Tensors) -> None:
    return


def _spoiled(world: World, failure: Failure) -> Path:
    from safetensors.torch import load_file, save_file

    assert failure.spoil is not None
    folder = world.folder / failure.name.replace(" ", "-")
    folder.mkdir()
    tensors = load_file(world.checkpoints[1] / "model.safetensors")
    failure.spoil(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((world.checkpoints[1] / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": failure.tied}))
    return folder


@contextlib.contextmanager
def without_preflight() -> Iterator[None]:
    """Every version is let through, so that only the proofs on the engine stand between it and the rotation."""

    def let_through(store: VersionStore, version: str, *_rest: object) -> Manifest:
        return store.manifest(version)

    with mock.patch("services.weights.fleet.inspect", let_through):
        yield


# --- bad engines ----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _loading(world: World, load: Load) -> AsyncIterator[None]:
    world.engine.load_instead = load
    try:
        yield
    finally:
        world.engine.load_instead = None


@contextlib.asynccontextmanager
async def _stale_cache(world: World) -> AsyncIterator[None]:
    async def load(path: Path, version: str) -> None:
        request = {"model_path": str(path), "weight_version": version, "flush_cache": False}
        await world.engine.post("/update_weights_from_disk", request)

    async with _loading(world, load):
        yield


@contextlib.asynccontextmanager
async def _only_the_label(world: World) -> AsyncIterator[None]:
    async def load(_path: Path, version: str) -> None:
        await world.engine.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async with _loading(world, load):
        yield


@contextlib.asynccontextmanager
async def _answer_lost(world: World) -> AsyncIterator[None]:
    world.cut.at = b"Weight version updated to"
    try:
        yield
    finally:
        world.cut.at = b""


@contextlib.asynccontextmanager
async def _hung(world: World) -> AsyncIterator[None]:
    """Stopped with the load on its way, which it carries out when it goes on."""

    async def load(path: Path, version: str) -> None:
        world.server.signal(signal.SIGSTOP)
        await world.engine.load_as_ever(path, version)

    with world.engine.hurried():
        async with _loading(world, load):
            try:
                yield
            finally:
                world.server.signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def _killed(world: World) -> AsyncIterator[None]:
    async def load(path: Path, version: str) -> None:
        world.server.signal(signal.SIGSTOP)
        asking = asyncio.ensure_future(world.engine.load_as_ever(path, version))
        await asyncio.sleep(0)
        world.server.kill()
        await asking

    async with _loading(world, load):
        yield


@contextlib.asynccontextmanager
async def _busy(world: World, max_new_tokens: int) -> AsyncIterator[None]:
    """With a request that runs for as long as the block."""
    await world.slow_down(0.05)
    request = {"input_ids": IDS, "sampling_params": {"max_new_tokens": max_new_tokens, "ignore_eos": True}}
    async with httpx.AsyncClient(base_url=world.server.url, timeout=120) as http:
        turn = asyncio.ensure_future(http.post("/generate", json=request))
        try:
            await eventually(lambda: _at_work(world), what="a request to run", timeout_s=30, poll_s=0.02)
            yield
        finally:
            await world.slow_down(None)
            await world.engine.resume()
            (await turn).raise_for_status()


async def _at_work(world: World) -> bool:
    return await world.running() > 0


async def _idle(world: World) -> bool:
    return await world.running() == 0


@contextlib.asynccontextmanager
async def _flush_refused(world: World) -> AsyncIterator[None]:
    """Paused in place, so that a running request holds the cache: the weights change, the cache can't be dropped."""
    async with _busy(world, 300):
        world.engine.pause_mode = "in_place"
        try:
            yield
        finally:
            world.engine.pause_mode = "retract"


@contextlib.asynccontextmanager
async def _health_while_paused(world: World) -> AsyncIterator[None]:
    """/health hangs while the round has the engine paused: whoever asks it takes the engine for dead."""
    answers: list[str] = []

    async def load(path: Path, version: str) -> None:
        async with httpx.AsyncClient(base_url=world.server.url, timeout=1.5) as http:
            try:
                answers.append(str((await http.get("/health")).status_code))
            except httpx.ReadTimeout:
                answers.append("none")
        await world.engine.load_as_ever(path, version)

    async with _loading(world, load):
        yield
    if answers != ["none"]:
        msg = f"/health of a paused engine answered {answers}, expected none: the failure was not provoked"
        raise AssertionError(msg)


@contextlib.asynccontextmanager
async def _abort_lost(world: World) -> AsyncIterator[None]:
    """A rollout gives a turn up while the engine is paused: the abort is lost, the turn runs on, for nobody."""
    turns = RolloutEngine("engine-0", world.server.url, VOCABULARY)
    await world.slow_down(0.05)
    await world.engine.resume()
    await world.engine.pause()
    try:
        turn = turns.generate(IDS, max_new_tokens=400, stop_token_ids=[], rid=uuid.uuid4().hex, timeout_s=0.5)
        with contextlib.suppress(EngineTimeoutError):
            await turn
            msg = "a turn ended on a paused engine: the failure was not provoked"
            raise AssertionError(msg)
        await world.engine.resume()
        await eventually(lambda: _at_work(world), what="the aborted turn to run", timeout_s=30, poll_s=0.02)
        yield
    finally:
        await turns.close()
        await world.slow_down(None)
        await world.engine.resume()
        await eventually(lambda: _idle(world), what="the aborted turn's end", timeout_s=60, poll_s=0.02)


FAILURES = (
    Failure("fused names", "canary: log-prob", Serves.GOOD, spoil=_fused, refused="fused name"),
    Failure("unknown names", "canary: log-prob", Serves.GOOD, spoil=_unknown, refused="missing .* and .* unknown"),
    Failure("half a checkpoint", "canary: log-prob", Serves.GOOD, spoil=_half, refused="missing"),
    Failure("tied head", "canary: log-prob", Serves.GOOD, spoil=_headless, tied=True, refused=r"lm_head\.weight"),
    Failure("NaN", "NaN weights", Serves.GOOD, spoil=_nan, refused="lm_head.weight holds NaN"),
    Failure("other weights than the canary's", "canary: log-prob", Serves.GOOD, spoil=_as_it_is, other_policy=True),
    Failure(
        "wrong shape", "engine-0, load", Serves.NOTHING, spoil=_narrow, refused="lm_head.weight has shape",
        ends_engine=True,
    ),
    Failure(
        "canary outside the vocabulary", "engine-0", Serves.NOTHING, spoil=_as_it_is, canary=[[1, 5, 4096, 7]],
        refused="token id 4096 is outside the vocabulary", ends_engine=True,
    ),
    Failure("stale cache", "stale prefix cache", Serves.NOTHING, provoke=_stale_cache),
    Failure("new label, old weights", "nothing was loaded", Serves.NOTHING, provoke=_only_the_label),
    Failure("refused flush", "engine-0, flush: HTTP 400", Serves.NOTHING, provoke=_flush_refused),
    Failure("lost answer", "engine-0, load: .*/update_weights_from_disk", Serves.NOTHING, provoke=_answer_lost),
    Failure("hung", "engine-0, load: no answer .* within", Serves.NOTHING, provoke=_hung),
    Failure("killed in a load", "engine-0, load", Serves.NOTHING, provoke=_killed, ends_engine=True),
    Failure("/health while paused", "", Serves.NEW, provoke=_health_while_paused),
    Failure("lost abort", "", Serves.NEW, provoke=_abort_lost),
)  # fmt: skip


# --- one row --------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def fleet_of(
    servers: Sequence[EngineServer], checkpoints: tuple[Path, Path], folder: Path
) -> AsyncIterator[World]:
    """The service's parts on these servers; the first is asked through a link."""
    board, store = RememberingBoard(), FileSystemVersionStore(folder / "run" / "versions", 0)
    proxies = Proxies()
    try:
        cut = Cut()
        link = proxies.link(servers[0].port, cut.watcher)
        urls = [f"http://127.0.0.1:{link.port}", *(server.url for server in servers[1:])]
        engines = [FaultyEngine(f"engine-{number}", url, deadline_s=20.0) for number, url in enumerate(urls)]
        sets = [f'run.dir="{folder / "run"}"', f"engine.urls={json.dumps(urls)}", "weights.round_attempts=1"]
        config = load_run_config(None, sets, env={})
        hurried = partial(KeeperSettings, probe_s=0.0, cool_down_s=0.2)
        with mock.patch("services.weights.app.KeeperSettings", hurried):
            fleet, keepers = build_keepers(config, engines, board, store, Health(60))
        world = World(servers, checkpoints, folder, proxies, engines, keepers, fleet, board, store, cut)
        await fleet.restore()
        for keeper in keepers:
            await keeper.restore()
        try:
            yield world
        finally:
            for engine in engines:
                await engine.close()
    finally:
        proxies.close()


async def provoke(failure: Failure, world: World) -> dict[str, Any]:
    """What the service said, and what it got wrong."""
    good = await world.publish(world.checkpoints[0])
    await world.step_until(lambda: world.serves(good.version), f"{good.version} to serve")
    before = [await engine.checksums() for engine in world.engines]
    problems: list[str] = []
    if failure.bad_version:
        bad = _spoiled(world, failure)
        if failure.refused:
            problems += await _refused_unsent(failure, world, bad, good.version)
        with without_preflight():
            found = await _unproven_version(failure, world, bad, good.version, before)
    else:
        found = await _failing_engine(failure, world)
    problems += found
    told = [facts for facts in world.board.told if facts.engine_id == "engine-0"]
    said = next((facts.error for facts in told if failure.says and re.search(failure.says, facts.error)), "")
    errors = sorted({facts.error for facts in told if facts.error})
    if failure.says and not said:
        problems.append(f"said {errors}, expected {failure.says!r}")
    if not failure.says and errors:
        problems.append(f"said {errors}, expected nothing: it does not matter")
    following = await _following(failure, world)
    problems += await _holds(world, following.version)
    if stray := {path for engine in world.engines for path in engine.asked} - ROUTES:
        problems.append(f"the service asked {sorted(stray)}")
    problems += world.proxies.errors
    return {"passed": not problems, "problems": problems, "said": said, "serves": failure.serves.value}


async def _refused_unsent(failure: Failure, world: World, bad: Path, good: str) -> list[str]:
    """Preflight by itself: no engine hears of the version."""
    refused = await world.publish(bad, policy=world.checkpoints[1], canary=failure.canary)
    for engine in world.engines:
        engine.asked.clear()
    await asyncio.gather(*(keeper.step() for keeper in world.keepers))
    detail = world.fleet.refused.get(refused.version, "nothing")
    problems = [] if re.search(failure.refused, detail) else [f"preflight says {detail}, expected {failure.refused!r}"]
    if any("/update_weights_from_disk" in engine.asked for engine in world.engines):
        problems.append(f"an engine was asked to load {refused.version}, which was refused")
    return problems if world.serves(good) else [*problems, f"not every engine serves {good} after a refused version"]


async def _unproven_version(
    failure: Failure, world: World, bad: Path, good: str, before: Sequence[Mapping[str, str]]
) -> list[str]:
    policy = world.checkpoints[0 if failure.other_policy else 1]
    version = (await world.publish(bad, policy=policy, canary=failure.canary)).version
    tried = [keeper.facts.since_s for keeper in world.keepers]
    if failure.serves is Serves.NOTHING:
        await world.step_until(
            lambda: all(keeper.facts.state is EngineState.QUARANTINED for keeper in world.keepers),
            f"every engine to be out of rotation after {version}",
        )
        return _unproven_served(world, version)
    await world.step_until(
        lambda: (
            world.serves(good)
            and all(keeper.facts.since_s > since for keeper, since in zip(world.keepers, tried, strict=True))
        ),
        f"{good} to serve again after {version}",
    )
    problems = _unproven_served(world, version)
    if [await engine.checksums() for engine in world.engines] != list(before):
        problems.append(f"an engine in rotation holds other weights than {good}")
    if version not in world.fleet.refused:
        problems.append(f"{version} is not refused, it may be tried again")
    return problems


def _unproven_served(world: World, version: str) -> list[str]:
    served = [facts.engine_id for facts in world.board.told if facts.in_rotation and facts.version == version]
    return [f"{version} was in rotation on {sorted(set(served))}"] if served else []


async def _failing_engine(failure: Failure, world: World) -> list[str]:
    """A good version meets an engine that fails; the others take it."""
    assert failure.provoke is not None
    first, others = world.keepers[0], world.keepers[1:]
    async with failure.provoke(world):
        new = (await world.publish(world.checkpoints[1])).version
        if failure.serves is Serves.NEW:
            await world.step_until(lambda: world.serves(new), f"{new} to serve in spite of it")
            return []
        await world.step_until(
            lambda: first.facts.state is EngineState.QUARANTINED and world.serves(new, others),
            f"engine-0 out of rotation, and the others at {new}",
        )
    told = [facts for facts in world.board.told if facts.engine_id == "engine-0"]
    return [f"{new} was in rotation on engine-0"] if any(f.in_rotation and f.version == new for f in told) else []


async def _following(failure: Failure, world: World) -> Manifest:
    following = await world.publish(world.checkpoints[1])
    if failure.ends_engine:  # every engine by a bad version, otherwise the first
        for server in world.servers if failure.bad_version else [world.server]:
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
    await world.step_until(lambda: world.serves(following.version), f"the next version {following.version} to serve")
    return following


async def _holds(world: World, version: str) -> list[str]:
    sequences = [IDS, list(CANARY[0])]
    expected = [oracle(world.published[version], ids) for ids in sequences]
    problems = []
    for engine in world.engines:
        found = await engine.score(sequences)
        worst = max(
            abs(x - y) for mine, true in zip(found, expected, strict=True) for x, y in zip(mine, true, strict=True)
        )
        if worst > 1e-4:
            problems.append(f"{engine.engine_id} serves {version} with log-probs off by {worst:.3g}")
    return problems


def prove(folder: Path) -> dict[str, Any]:
    """Every row on a fleet of two."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    checkpoints = make_tiny_checkpoint(folder / "seed0", 0), make_tiny_checkpoint(folder / "seed1", 1)
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(2):
            (folder / f"engine-{number}").mkdir()
            servers.append(stack.enter_context(engine_server(checkpoints[0], folder / f"engine-{number}")))
        rows = {failure.name: asyncio.run(_row(failure, servers, checkpoints, folder)) for failure in FAILURES}
    return {"passed": all(row["passed"] for row in rows.values()), "engines": len(servers), "failures": rows}


async def _row(
    failure: Failure, servers: Sequence[EngineServer], checkpoints: tuple[Path, Path], folder: Path
) -> dict[str, Any]:
    root = folder / failure.name.replace(" ", "-").replace("/", "")
    root.mkdir()
    async with fleet_of(servers, checkpoints, root) as world:
        found = await provoke(failure, world)
    for server in servers:
        await asyncio.to_thread(server.load_launched)
    return found
