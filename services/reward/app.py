"""Wires the reward service: REST and the stream consumer in one process, each ending with the other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import SecretStr

import sao.board
import sao.streams
from sao.board.base import Board
from sao.config import ConfigError, RunConfig
from sao.config.schema import PreferenceBounds
from sao.problems import Bearer, install
from sao.rest import Server
from sao.streams.base import TrajectoryStreams
from sao.tasks import TaskLoadError, load_task
from sao.tasks.base import OffersPreferences, Task
from sao.tasks.tiny_tokenizer import VocabularyError, tokenizer_of_run
from sao.telemetry.health import Health
from sao.telemetry.logs import get_logger
from sao.telemetry.routes import TELEMETRY_PATHS, answer
from sao.tokenizer import Tokenizer
from services.reward.alarm_watch import AlarmWatch
from services.reward.alarms import Alarms
from services.reward.catalogue import Catalogue, Computes
from services.reward.changes import PATH
from services.reward.console.pages import PATH as CONSOLE
from services.reward.console.pages import pages
from services.reward.console.routes import ConsoleRoutes
from services.reward.consumer import Consumer
from services.reward.preference_folder import Keeper, PreferenceFolder
from services.reward.preferences import PreferenceRoutes, ensure_preference
from services.reward.retry import patiently
from services.reward.scorer import TrajectoryScorer
from services.reward.scorers import connect as connect_scorers
from services.reward.scoring import COMPONENTS_PATH, SCORE_PATH, ScoringRoutes

GRACE_S = 3.0
"""What is in flight at a stop gets this long; the rest stays pending and is scored after the restart."""

log = get_logger(__name__)


def create_app(
    task: Task,
    board: Board,
    health: Health,
    token: SecretStr | None,
    keeper: Keeper,
    *,
    archive: Path,
    bounds: PreferenceBounds | None = None,
    catalogue: Catalogue | None = None,
    scoring: ScoringRoutes | None = None,
) -> FastAPI:
    """The HTTP side: preferences and scoring under /v1, an index at /, telemetry beside it.

    `archive`: where the trainer keeps what it trained on; `bounds`: none means the defaults. Without a catalogue the
    run computes what its task does.
    """
    computes: Computes = catalogue or task
    preferences = PreferenceRoutes(board, computes, keeper, bounds or PreferenceBounds(), archive)
    app = FastAPI(title="SAO reward", docs_url=None, redoc_url=None)
    install(app, RequestValidationError)
    app.include_router(preferences.router(), dependencies=[Depends(Bearer(token))])
    if scoring is not None:
        app.include_router(scoring.router(), dependencies=[Depends(Bearer(token))])

    async def index() -> dict[str, object]:
        """What this service is, and where to go."""
        offered = sorted(task.preferences) if isinstance(task, OffersPreferences) else []
        return {
            "service": "reward",
            "task": task.name,
            "components": sorted(computes.components),
            "preferences_of_the_task": offered,
            "endpoints": {
                f"GET {PATH}": "the current preference; its ETag is the version",
                f"GET {PATH}/{{version}}": "an earlier preference",
                f"PUT {PATH}": "change what is rewarded from the next scoring on; If-Match guards against others",
                f"POST {PATH}:dry-run": "what a document would change for the newest trained trajectories",
                f"GET {PATH}/history": "every version, newest first: when, by whom, why",
                f"POST {PATH}/{{version}}:rollback": "make an older version's document the next version",
                f"GET, POST {PATH}/schedule": "switches that wait for a time or an update",
                f"DELETE {PATH}/schedule/{{id}}": "forget one of them",
                f"POST {PATH}:hold, {PATH}:resume": "refuse every change; go on",
                f"GET {PATH}/hold": "whether changes are held",
                f"GET {COMPONENTS_PATH}": "what a preference may read, and who computes it",
                f"POST {SCORE_PATH}": "what one text or trajectory would get; changes nothing",
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


def add_console(
    app: FastAPI, config: RunConfig, board: Board, streams: TrajectoryStreams, tokenizer: Tokenizer
) -> None:
    """The console: its page under /console, and what it reads under /v1."""
    routes = ConsoleRoutes(config, board, streams, tokenizer)
    app.include_router(routes.router(), dependencies=[Depends(Bearer(config.auth.token))])
    app.include_router(pages())


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
    scorers = connect_scorers(config)
    catalogue = Catalogue(task, settings, scorers)
    streams, board = sao.streams.connect(config), sao.board.connect(config)
    slowest_s = max([settings.component_timeout_s, *(scorer.deadline_s for scorer in scorers)])
    health = Health(stalled_after_s=max(60.0, 3 * slowest_s))
    try:
        keeper = Keeper(board, PreferenceFolder(config.run.dir), min_seconds=settings.preference_min_seconds)
        await patiently(keeper.once)
        await ensure_preference(board, config.preference, catalogue, settings.bounds)
        alarms = AlarmWatch(Alarms(settings.alarms)) if settings.alarms.enabled else None
        current = partial(patiently, board.preference)
        scorer = TrajectoryScorer(task, tokenizer, current, settings, scorers=scorers, alarms=alarms)
        scoring = ScoringRoutes(
            scorer, catalogue, task, tokenizer, board=board, streams=streams, run_dir=config.run.dir
        )
        app = create_app(
            task,
            board,
            health,
            config.auth.token,
            keeper,
            archive=config.run.dir / "archive",
            bounds=settings.bounds,
            catalogue=catalogue,
            scoring=scoring,
        )
        add_console(app, config, board, streams, tokenizer)
        server = Server(app, grace_s=2)
        family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
        with socket.create_server((settings.bind, settings.port), family=family) as listener:
            log.info("reward service listens", bind=settings.bind, port=listener.getsockname()[1], task=task.name)
            await _together(server, listener, Consumer(streams, scorer, settings, health), keeper, stop)
    finally:
        for one in scorers:
            await one.close()
        await streams.close()
        await board.close()


async def _together(
    server: Server, listener: socket.socket, consumer: Consumer, keeper: Keeper, stop: asyncio.Event
) -> None:
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    consuming = asyncio.ensure_future(consumer.run(stop))
    keeping = asyncio.ensure_future(keeper.run())
    stopped = asyncio.ensure_future(stop.wait())
    parts: set[asyncio.Future[Any]] = {serving, consuming, keeping, stopped}
    try:
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        server.should_exit = True
        await asyncio.wait({serving, consuming}, timeout=GRACE_S)
    finally:
        for part in parts:
            part.cancel()
        results = await asyncio.gather(*parts, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
