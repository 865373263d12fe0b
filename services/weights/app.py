"""Wiring of the weights service: the fleet, its engines and their keepers, and REST with telemetry on one port."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import SecretStr

import sao.board
from sao.board.base import Board, EngineState
from sao.config import ConfigError
from sao.config.schema import RunConfig
from sao.endings import end
from sao.problems import Bearer, install
from sao.rest import Server
from sao.streams.base import FencedError, StreamUnavailableError
from sao.telemetry import traces
from sao.telemetry.health import Health
from sao.telemetry.logs import get_logger
from sao.telemetry.routes import TELEMETRY_PATHS, answer
from sao.weights.base import VersionStore
from sao.weights.control import CONTROL_FILE, ControlFile, ControlFileError
from sao.weights.filesystem import FileSystemVersionStore
from services.weights import metrics
from services.weights.canary import CalibrateOnFirst, Exact, Tolerance
from services.weights.claim import EPOCHS_FOLDER, Claim, this_process
from services.weights.discovery.base import Discovery, DiscoveryError, Located
from services.weights.discovery.dns import DnsDiscovery
from services.weights.discovery.static import StaticDiscovery
from services.weights.engines.base import EngineControl, PauseMode
from services.weights.engines.sglang import SGLangEngine
from services.weights.fleet import Fleet
from services.weights.holds import Holds
from services.weights.keeper import Keeper, KeeperSettings
from services.weights.members import Members
from services.weights.readings import ReadAhead
from services.weights.routes import WeightRoutes
from services.weights.slots import Slots

log = get_logger(__name__)
_STALL_ROUNDS = 12
"""A round has about ten calls, each with the step's deadline."""
_STOP_S = 2.0
_BOARD_WAIT_S = 60.0
_LOOK_EVERY_S = 3.0
_HOLD_EVERY_S = 1.0
_LOOK_S = 2.0
"""Longest wait for one answer about which engines there are."""


def build_app(fleet: Fleet, keepers: Sequence[Keeper], health: Health, token: SecretStr | None) -> FastAPI:
    """The routes under /v1 (bearer token when one is configured), and the telemetry paths."""
    app = FastAPI(title="SAO weights", docs_url=None, redoc_url=None)
    install(app, RequestValidationError)
    app.include_router(WeightRoutes(fleet, keepers).router(), dependencies=[Depends(Bearer(token))])
    # Not a mount at "/": it would answer for every path, and wrong ones would get no problem document.
    for path in TELEMETRY_PATHS:
        app.add_api_route(path, _telemetry(health), methods=["GET"], include_in_schema=False)
    return app


def _telemetry(health: Health) -> Callable[[Request], Awaitable[Response]]:
    async def show(request: Request) -> Response:
        reply = answer(request.url.path, health)
        return Response(reply.body, reply.status, headers={"Content-Type": reply.content_type})

    return show


def tolerance_for(config: RunConfig) -> Tolerance:
    """float32 is held to `weights.canary_tolerance` per token.

    bfloat16 is held to what the run's first version showed, whose mean must be within `weights.canary_tolerance`.
    """
    tolerance = config.weights.canary_tolerance
    if config.engine.dtype == "float32":
        return Exact(tolerance)
    return CalibrateOnFirst(config.versions_dir / "canary-calibration.json", tolerance)


def build_engine(config: RunConfig, located: Located) -> SGLangEngine:
    """A client for one engine."""
    api, admin = config.engine.api_key, config.engine.admin_key
    return SGLangEngine(
        located.engine_id,
        located.url,
        deadline_s=config.weights.step_timeout_s,
        api_key=api.get_secret_value() if api is not None else None,
        admin_key=admin.get_secret_value() if admin is not None else None,
    )


def build_discovery(config: RunConfig) -> Discovery:
    """What names the engines: the run file, or DNS."""
    if config.engine.discovery == "static":
        return StaticDiscovery(config.engine.urls)
    name, _, port = config.engine.dns.rpartition(":")
    return DnsDiscovery(name, int(port), deadline_s=_LOOK_S)


def build_fleet(
    config: RunConfig,
    board: Board,
    store: VersionStore,
    health: Health,
    claim: Claim | None = None,
    *,
    tracer: traces.Tracer = traces.OFF,
) -> tuple[Fleet, Slots, Callable[[EngineControl], Keeper]]:
    """A fleet without engines, and what makes a keeper for one."""
    drift = config.weights.canary_drift_max
    fleet = Fleet(
        board,
        store,
        [],
        keep_versions=config.weights.keep_versions,
        holds=Holds(ControlFile(config.versions_dir / CONTROL_FILE)),
        drift_max=drift if drift != "off" else None,
        claim=claim,
        run_dir=config.run.dir,
    )
    settings = KeeperSettings(
        attempts=config.weights.round_attempts,
        poll_s=config.weights.poll_s,
        dtype=config.engine.dtype,
        mode=PauseMode(config.weights.mode),
    )
    tolerance = tolerance_for(config)
    slots = Slots(config.weights.engines_out_max, hold_s=_STALL_ROUNDS * config.weights.step_timeout_s)
    return fleet, slots, lambda engine: Keeper(engine, fleet, settings, tolerance, health, slots=slots, tracer=tracer)


def build_keepers(
    config: RunConfig, engines: Sequence[EngineControl], board: Board, store: VersionStore, health: Health
) -> tuple[Fleet, list[Keeper]]:
    """The fleet and its keepers for engines that are known, nothing started."""
    fleet, _, keeper_for = build_fleet(config, board, store, health)
    for engine in engines:
        fleet.join(engine.engine_id)
    return fleet, [keeper_for(engine) for engine in engines]


async def _patiently(call: Callable[[], Awaitable[None]], stop: asyncio.Event) -> None:
    """Repeat a call that board or discovery does not answer, at most for `_BOARD_WAIT_S`."""
    deadline = time.monotonic() + _BOARD_WAIT_S
    while not stop.is_set():
        try:
            return await call()
        except (StreamUnavailableError, DiscoveryError) as error:
            if time.monotonic() > deadline:
                raise
            log.warning("no answer yet", error=str(error))
            await asyncio.sleep(0.2)
    return None


def _first(group: ExceptionGroup[FencedError]) -> FencedError:
    """One of them: each part of the service that wrote says the same."""
    found = group.exceptions[0]
    return _first(found) if isinstance(found, ExceptionGroup) else found


async def main(config: RunConfig, stop: asyncio.Event) -> None:
    """Serve REST and keep every engine at the newest version until told to stop."""
    tracer = traces.connect(config, "weights")
    board = sao.board.connect(config)
    store = FileSystemVersionStore(config.versions_dir, config.checkpoint.free_space_mb << 20)
    health = Health(stalled_after_s=_STALL_ROUNDS * config.weights.step_timeout_s)
    claim = Claim(board, config.versions_dir / EPOCHS_FOLDER, owner=this_process())
    fleet, slots, keeper_for = build_fleet(config, board, store, health, claim, tracer=tracer)
    discovery = build_discovery(config)
    members = Members(discovery, fleet, slots, make_engine=partial(build_engine, config), make_keeper=keeper_for)
    metrics.ENGINES_QUARANTINED.set_function(
        lambda: float(sum(keeper.facts.state is EngineState.QUARANTINED for keeper in members.keepers))
    )
    server = Server(build_app(fleet, members.keepers, health, config.auth.token), grace_s=1)
    family = socket.AF_INET6 if ":" in config.weights.bind else socket.AF_INET
    try:
        with socket.create_server((config.weights.bind, config.weights.port), family=family) as listener:
            log.info("weights service listens", bind=config.weights.bind, port=listener.getsockname()[1])
            await _patiently(claim.take, stop)
            await _patiently(members.begin, stop)
            health.working("keeping the engines")
            health.set_ready(True)
            async with asyncio.TaskGroup() as group:
                parts = [group.create_task(fleet.run(stop, config.weights.poll_s))]
                parts += [group.create_task(ReadAhead(store, fleet.readings).run(stop, config.weights.poll_s))]
                parts += [group.create_task(claim.run(stop, _HOLD_EVERY_S))]
                parts += [group.create_task(members.run(stop, _LOOK_EVERY_S))]
                parts += [group.create_task(server.serve(sockets=[listener]))]
                await stop.wait()
                server.should_exit = True
                _, late = await asyncio.wait(parts, timeout=_STOP_S)
                await end(late)
    except ExceptionGroup as group:
        if fenced := group.subgroup(FencedError):
            raise _first(fenced) from None
        raise
    except ControlFileError as error:
        raise ConfigError(key="weights.store_dir", message=str(error)) from error
    finally:
        await members.close()
        await board.close()
        await tracer.close()
