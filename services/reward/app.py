"""Wires the reward service: REST and the stream consumer in one process, each ending with the other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import SecretStr

import sao.board
import sao.streams
from sao.board.base import Board
from sao.config import ConfigError, RunConfig
from sao.problems import Bearer, install
from sao.rest import Server
from sao.tasks import TaskLoadError, load_task
from sao.tasks.base import OffersPreferences, Task
from sao.tasks.tiny_tokenizer import VocabularyError, tokenizer_of_run
from sao.telemetry.health import Health
from sao.telemetry.logs import get_logger
from sao.telemetry.routes import TELEMETRY_PATHS, answer
from services.reward.consumer import Consumer
from services.reward.feedback.desk import Desk
from services.reward.feedback.routes import FeedbackRoutes
from services.reward.preference_folder import Keeper, PreferenceFolder
from services.reward.preferences import PATH, PreferenceRoutes, ensure_preference
from services.reward.retry import patiently
from services.reward.scorer import TrajectoryScorer

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
    feedback: FeedbackRoutes | None = None,
) -> FastAPI:
    """The HTTP side: preferences and feedback under /v1, an index at /, telemetry beside it."""
    late = feedback.components if feedback is not None else frozenset()
    app = FastAPI(title="SAO reward", docs_url=None, redoc_url=None)
    install(app, RequestValidationError)
    app.include_router(PreferenceRoutes(board, task, keeper, late).router(), dependencies=[Depends(Bearer(token))])
    if feedback is not None:
        app.include_router(feedback.router(), dependencies=[Depends(Bearer(token))])

    async def index() -> dict[str, object]:
        """What this service is, and where to go."""
        offered = sorted(task.preferences) if isinstance(task, OffersPreferences) else []
        return {
            "service": "reward",
            "task": task.name,
            "components": sorted(task.components | late),
            "preferences_of_the_task": offered,
            "endpoints": {
                f"GET {PATH}": "the current preference; its ETag is the version",
                f"GET {PATH}/{{version}}": "an earlier preference",
                f"PUT {PATH}": "change what is rewarded from the next scoring on; If-Match guards against others",
                **(feedback.endpoints if feedback is not None else {}),
                "GET /openapi.json": "the schema of the above",
                "GET /metrics, /healthz, /readyz": "telemetry",
            },
        }

    app.add_api_route("/", index, methods=["GET"])
    # Not a mount at "/": it would answer for every path, and wrong ones would get no problem document.
    for path in TELEMETRY_PATHS:
        app.add_api_route(path, _telemetry(health), methods=["GET"], include_in_schema=False)
    return app


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
    refuse_ambiguous_feedback(config, task)
    streams, board = sao.streams.connect(config), sao.board.connect(config)
    desk = Desk(streams.room, board.preference, settings.feedback) if settings.feedback is not None else None
    feedback = FeedbackRoutes(desk, streams, tokenizer) if desk is not None else None
    late = settings.feedback.component if settings.feedback is not None else None
    health = Health(stalled_after_s=max(60.0, 3 * settings.component_timeout_s))
    try:
        keeper = Keeper(board, PreferenceFolder(config.run.dir))
        await patiently(keeper.once)
        await ensure_preference(board, config.preference, task, frozenset({late} if late else ()))
        app = create_app(task, board, health, config.auth.token, keeper, feedback=feedback)
        server = Server(app, grace_s=2)
        family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
        with socket.create_server((settings.bind, settings.port), family=family) as listener:
            log.info("reward service listens", bind=settings.bind, port=listener.getsockname()[1], task=task.name)
            scorer = TrajectoryScorer(task, tokenizer, lambda: patiently(board.preference), settings, late=late)
            consumer = Consumer(streams, scorer, settings, health, desk=desk)
            beside = [keeper.run(), *([desk.run()] if desk is not None else [])]
            await _together(server, listener, consumer, beside, stop)
    finally:
        await streams.close()
        await board.close()


def refuse_ambiguous_feedback(config: RunConfig, task: Task) -> None:
    """ConfigError when the feedback has the name of a component that the task computes."""
    feedback = config.reward.feedback
    if feedback is not None and feedback.component in task.components:
        msg = f"task {task.name} computes {feedback.component!r} itself: give the feedback a name of its own"
        raise ConfigError(key="reward.feedback.component", message=msg)


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
        for part in parts:
            part.cancel()
        results = await asyncio.gather(*parts, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
