"""Wires the reward service: REST and the stream consumer in one process, each ending with the other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import SecretStr

import sao.board
import sao.streams
from sao.board.base import Board
from sao.config import ConfigError, RunConfig
from sao.endings import end
from sao.problems import Bearer, install
from sao.rest import Server
from sao.streams.base import TrajectoryStreams
from sao.tasks import TaskLoadError, load_task
from sao.tasks.base import OffersPreferences, Task
from sao.tasks.tiny_tokenizer import VocabularyError, tokenizer_of_run
from sao.telemetry import traces
from sao.telemetry.health import Health
from sao.telemetry.logs import get_logger
from sao.telemetry.routes import TELEMETRY_PATHS, answer
from sao.tokenizer import Tokenizer
from services.reward.alarm_watch import AlarmWatch
from services.reward.alarms import Alarms
from services.reward.catalogue import Catalogue
from services.reward.console.pages import PATH as CONSOLE
from services.reward.console.pages import pages
from services.reward.console.routes import ConsoleRoutes
from services.reward.consumer import Consumer
from services.reward.feedback.desk import Desk
from services.reward.feedback.leftovers import Leftovers
from services.reward.feedback.routes import FeedbackRoutes
from services.reward.preferences.folder import Keeper, PreferenceFolder
from services.reward.preferences.routes import PreferenceRoutes, ensure_preference
from services.reward.retry import patiently
from services.reward.scorer import TrajectoryScorer
from services.reward.scorers import connect as connect_scorers
from services.reward.scorers.base import ComponentScorer
from services.reward.scoring import ScoringRoutes

GRACE_S = 3.0
"""What is in flight at a stop gets this long; the rest stays pending and is scored after the restart."""

log = get_logger(__name__)


@dataclass(frozen=True)
class RewardService:
    """The parts of one replica, wired and not yet running."""

    app: FastAPI
    catalogue: Catalogue
    consumer: Consumer
    keeper: Keeper
    desk: Desk | None
    """None: the run asks for no feedback."""


def wire(
    config: RunConfig,
    task: Task,
    tokenizer: Tokenizer,
    *,
    board: Board,
    streams: TrajectoryStreams,
    health: Health,
    scorers: Sequence[ComponentScorer] = (),
    tracer: traces.Tracer = traces.OFF,
) -> RewardService:
    """Everything over one store and one run folder; ConfigError where two compute a component of the same name."""
    settings, run_dir = config.reward, config.run.dir
    catalogue = Catalogue(task, settings, scorers)
    keeper = Keeper(board, PreferenceFolder(run_dir), min_seconds=settings.preference_min_seconds)
    desk = None
    if settings.feedback is not None:
        desk = Desk(streams.room, board.preference, settings.feedback, tracer=tracer)
    alarms = AlarmWatch(Alarms(settings.alarms)) if settings.alarms.enabled else None
    current = partial(patiently, board.preference)
    scorer = TrajectoryScorer(task, tokenizer, current, settings, scorers=scorers, alarms=alarms)
    routers = [
        PreferenceRoutes(board, catalogue, keeper, settings.bounds, run_dir / "archive").router(),
        ScoringRoutes(scorer, catalogue, task, tokenizer, board=board, streams=streams, run_dir=run_dir).router(),
        ConsoleRoutes(config, board, streams, tokenizer, alarms=alarms.active if alarms is not None else list).router(),
    ]
    if desk is not None:
        routers.append(FeedbackRoutes(desk, streams, tokenizer).router())
    app = create_app(task, catalogue, health, config.auth.token, routers)
    consumer = Consumer(streams, scorer, settings, health, desk=desk, tracer=tracer)
    return RewardService(app, catalogue, consumer, keeper, desk)


def create_app(
    task: Task, catalogue: Catalogue, health: Health, token: SecretStr | None, routers: Sequence[APIRouter]
) -> FastAPI:
    """The HTTP side: `routers` behind the token, an index at /, the console's page and telemetry beside them."""
    app = FastAPI(title="SAO reward", docs_url=None, redoc_url=None)
    install(app, RequestValidationError)
    for router in routers:
        app.include_router(router, dependencies=[Depends(Bearer(token))])
    app.include_router(pages())

    async def index() -> dict[str, object]:
        """What this service is, and where to go."""
        offered = sorted(task.preferences) if isinstance(task, OffersPreferences) else []
        return {
            "service": "reward",
            "task": task.name,
            "components": sorted(catalogue.components),
            "preferences_of_the_task": offered,
            "endpoints": _endpoints(app)
            | {
                f"GET {CONSOLE}": "the console: a page for people; what it reads are the other routes under /v1",
                "GET /openapi.json": "the schema of the above",
                "GET /metrics, /healthz, /readyz": "telemetry",
            },
        }

    app.add_api_route("/", index, methods=["GET"])
    # Not a mount at "/": it would answer for every path, and wrong ones would get no problem document.
    for path in TELEMETRY_PATHS:
        app.add_api_route(path, _telemetry(health), methods=["GET"], include_in_schema=False)
    return app


def _endpoints(app: FastAPI) -> dict[str, str]:
    """Each documented route under /v1, with the first line of what it says of itself."""
    return {
        f"{method.upper()} {path}": route["description"].splitlines()[0]
        for path, methods in app.openapi()["paths"].items()
        if path.startswith("/v1/")
        for method, route in methods.items()
    }


def _telemetry(health: Health) -> Callable[[Request], Awaitable[Response]]:
    async def show(request: Request) -> Response:
        reply = answer(request.url.path, health)
        return Response(reply.body, reply.status, headers={"Content-Type": reply.content_type})

    return show


async def main(config: RunConfig, stop: asyncio.Event) -> None:
    """Serve and score until `stop`; when one of the two ends by itself, so does the process."""
    try:
        task = load_task(config.task.name)
        tokenizer = tokenizer_of_run(config.model.path, task)
    except (TaskLoadError, VocabularyError) as error:
        raise ConfigError(key="task.name", message=str(error)) from error
    settings = config.reward
    tracer = traces.connect(config, "reward")
    scorers = connect_scorers(config)
    streams, board = sao.streams.connect(config), sao.board.connect(config)
    slowest_s = max([settings.component_timeout_s, *(scorer.deadline_s for scorer in scorers)])
    health = Health(stalled_after_s=max(60.0, 3 * slowest_s))
    try:
        service = wire(
            config, task, tokenizer, board=board, streams=streams, health=health, scorers=scorers, tracer=tracer
        )
        await patiently(service.keeper.once)
        await ensure_preference(board, config.preference, service.catalogue, settings.bounds)
        server = Server(service.app, grace_s=2)
        family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
        with socket.create_server((settings.bind, settings.port), family=family) as listener:
            log.info("reward service listens", bind=settings.bind, port=listener.getsockname()[1], task=task.name)
            beside = [service.keeper.run(), (service.desk or Leftovers(streams.room)).run()]
            await _together(server, listener, service.consumer, beside, stop)
    finally:
        for one in scorers:
            await one.close()
        await streams.close()
        await board.close()
        await tracer.close()


async def _together(
    server: Server,
    listener: socket.socket,
    consumer: Consumer,
    beside: Sequence[Coroutine[Any, Any, None]],
    stop: asyncio.Event,
) -> None:
    """Until one of them ends by itself, or `stop`; what is `beside` is cancelled then."""
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    consuming = asyncio.ensure_future(consumer.run(stop))
    others = [asyncio.ensure_future(one) for one in beside]
    stopped = asyncio.ensure_future(stop.wait())
    parts: set[asyncio.Future[Any]] = {serving, consuming, stopped, *others}
    try:
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        server.should_exit = True
        await asyncio.wait({serving, consuming}, timeout=GRACE_S)
    finally:
        await end(parts)
    for part in parts:
        if part.done() and not part.cancelled() and (error := part.exception()) is not None:
            raise error
