"""The JSON that the console reads, under /v1: from the board, the streams and the run's folder; nothing is changed.

Files are read in a thread, on from where the last look ended, one reader at a time; answers are bounded by their
limits, not by the length of the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Path, Query
from google.protobuf.message import DecodeError
from pydantic import ValidationError

from sao.archive import ArchiveError
from sao.board.base import Board
from sao.config import RunConfig
from sao.curves import explained_variance, rejected_share
from sao.dead_letters import with_ids
from sao.problems import ProblemError
from sao.run_history import Curves, RunHistory
from sao.streams.base import StreamName, TrajectoryStreams
from sao.tokenizer import Tokenizer
from sao.trajectory_views import (
    MAX_TOKENS,
    PLACE,
    PlaceError,
    TrajectoryPage,
    TrajectoryReader,
    TrajectorySummary,
    TrajectoryView,
    summary_of_entry,
)
from services.reward.alarms import Alarm
from services.reward.console import views

MAX_PAGE = 200
MAX_LETTERS_SEARCHED = 1024
"""Newest dead letters that are looked through for a trajectory."""
STALLED_AFTER_S = 60.0
FRESH_S = 1.0
"""What was read from the board within this time is shown to everybody who asks."""

ENTRY_ID = r"^[0-9]{1,15}-[0-9]{1,15}$"
UUID = r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
T = TypeVar("T")


def _documented(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    schema = {"type": "object", "required": ["title", "status", "detail"]}
    content = {"application/problem+json": {"schema": schema}}
    return {status.value: {"description": status.phrase, "content": content} for status in statuses}


_ALWAYS: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.SERVICE_UNAVAILABLE)


class ConsoleRoutes:
    """The routes over one run."""

    def __init__(
        self,
        config: RunConfig,
        board: Board,
        streams: TrajectoryStreams,
        tokenizer: Tokenizer,
        *,
        alarms: Callable[[], list[Alarm]] = list,
        clock: Callable[[], float] = time.time,
    ) -> None:
        folder = config.run.dir
        self._config = config
        self._board = board
        self._streams = streams
        self._alarms = alarms
        self._clock = clock
        self._history = RunHistory(folder / "updates.jsonl")
        self._reader = TrajectoryReader(folder, tokenizer, max_lag=config.trainer.max_lag)
        self._reading = asyncio.Lock()
        self._versions = _Fresh(board.versions)
        self._engines = _Fresh(board.engines)

    def router(self) -> APIRouter:
        router = APIRouter()
        refused, lost = HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.NOT_FOUND
        plain, checked = _documented(*_ALWAYS), _documented(*_ALWAYS, refused)
        router.get("/v1/run", responses=plain)(self.run)
        router.get("/v1/curves", responses=checked)(self.curves)
        router.get("/v1/adaptation", responses=checked)(self.adaptation)
        router.get("/v1/engines", responses=plain)(self.engines)
        router.get("/v1/versions", responses=checked)(self.versions)
        router.get("/v1/dead-letters", responses=checked)(self.dead_letters)
        router.get("/v1/trajectories", responses=checked)(self.trajectories)
        inspected = _documented(*_ALWAYS, refused, lost)
        router.get("/v1/trajectories/{trajectory_id}", responses=inspected)(self.trajectory)
        return router

    async def run(self) -> views.RunView:
        """How the run stands."""
        await self._read_on()
        facts = await self._board.trainer()
        scoring = (await self._streams.depth(StreamName.TRAJECTORIES)).length
        training = (await self._streams.depth(StreamName.SCORED)).length
        history, last, now_s = self._history, self._history.last, self._clock()
        state = facts.state if facts is not None else None
        quiet_s = now_s - last.finished_s if last is not None else None
        stall = views.stall(state=state, quiet_s=quiet_s, scoring=scoring, training=training, after_s=STALLED_AFTER_S)
        return views.RunView(
            name=self._config.run.name,
            task=self._config.task.name,
            algorithm=self._config.trainer.algorithm,
            seed=self._config.run.seed,
            state=state,
            stall=stall if history.caught_up else "",
            phase=last.phase if last is not None else "",
            held=last.held if last is not None else [],
            alarms=self._alarms(),
            now_s=now_s,
            last_update_s=last.finished_s if last is not None else None,
            update=last.update if last is not None else 0,
            updates=self._config.run.updates,
            trajectories=history.trajectories,
            reward=history.average,
            components=history.components,
            lag=history.lag,
            version=(facts.version if facts is not None else "") or history.version or None,
            trajectories_per_s=history.trajectories_per_s,
            tokens_per_s=history.tokens_per_s,
            rejected=rejected_share(last) if last is not None else None,
            explained_variance=explained_variance(last) if last is not None else None,
            entropy=last.metrics.get("entropy") if last is not None else None,
            waiting_for_scoring=scoring,
            waiting_for_training=training,
            caught_up=history.caught_up,
        )

    async def curves(self, after: Annotated[int, Query(ge=0)] = 0) -> Curves:
        """Means of reward and components, and preference switches, after trajectory number `after`."""
        await self._read_on()
        return self._history.curves(after)

    async def adaptation(
        self, before: Annotated[int | None, Query(ge=1)] = None, limit: Limit = 20
    ) -> views.AdaptationsView:
        """How fast the run followed each preference but the first, newest first; only those below `before`."""
        await self._read_on()
        preferences = await self._board.preferences(before=before, limit=limit)
        followed = [one for one in preferences if one.origin != "initial" and one.stored_s > 0]
        return views.AdaptationsView(adaptations=[self._history.adaptation(one) for one in followed])

    async def engines(self) -> views.EnginesView:
        """Every engine that the weights service keeps, with its state and what it serves."""
        return views.EnginesView(engines=list((await self._engines.get()).values()))

    async def versions(self, limit: Limit = 20) -> views.VersionsView:
        """The newest weight versions, and who serves them."""
        return views.version_views(await self._versions.get(), await self._engines.get(), limit)

    async def dead_letters(
        self, before: Annotated[str | None, Query(pattern=ENTRY_ID)] = None, limit: Limit = 20
    ) -> views.DeadLettersView:
        """Trajectories that nobody could use, newest first, and why."""
        if before is not None and not any(map(int, before.split("-"))):
            return views.DeadLettersView(dead_letters=[], next=None)  # nothing is older than the first
        letters = await self._streams.dead_letters(count=limit, before=before)
        shown = [views.letter_view(letter) for letter in letters]
        return views.DeadLettersView(dead_letters=shown, next=shown[-1].entry_id if len(shown) == limit else None)

    async def trajectories(
        self, before: Annotated[str | None, Query(pattern=PLACE)] = None, limit: Limit = 50
    ) -> TrajectoryPage:
        """Newest first: without `before` those that wait, then those that were trained on; `next` leads to older."""
        await self._read_on()
        async with self._reading:
            with _problems():
                page = await asyncio.to_thread(self._reader.page, before, limit, self._history)
        if before is not None:
            return page
        # What is trained stays on its stream until the trainer's next checkpoint.
        trained = self._history.newest_ids
        waiting = [one for one in await self._waiting(limit) if one.id not in trained][:limit]
        return page.model_copy(update={"trajectories": [*waiting, *page.trajectories]})

    async def trajectory(
        self,
        trajectory_id: Annotated[str, Path(pattern=UUID)],
        first: Annotated[int, Query(ge=0, le=2**31)] = 0,
        count: Annotated[int, Query(ge=1, le=MAX_TOKENS)] = 2048,
    ) -> TrajectoryView:
        """One trajectory with the numbers of `count` of its tokens, from number `first` on."""
        window = range(first, first + count)
        with _problems():
            view = await asyncio.to_thread(self._reader.trained, trajectory_id, window)
        if view is None:
            view = await self._untrained(trajectory_id, window)
        if view is None:
            msg = (
                f"trajectory {trajectory_id} is neither in this run's folder nor in its streams; "
                "GET /v1/trajectories lists the newest"
            )
            raise ProblemError(HTTPStatus.NOT_FOUND, msg)
        return view

    async def _waiting(self, limit: int) -> list[TrajectorySummary]:
        waiting = await self._streams.newest(StreamName.TRAJECTORIES, count=limit)
        scored = await self._streams.newest(StreamName.SCORED, count=limit)
        return [
            *(summary_of_entry(entry.trajectory_id, entry.fields, "waiting") for entry in waiting),
            *(summary_of_entry(entry.trajectory_id, entry.fields, "scored") for entry in scored),
        ]

    async def _untrained(self, trajectory_id: str, window: range) -> TrajectoryView | None:
        payload = await self._streams.payload(trajectory_id)
        if payload is None:
            return None
        known = [one for one in await self._waiting(MAX_PAGE) if one.id == trajectory_id]
        summary, note = (known[0], "not trained on yet") if known else await self._dead(trajectory_id)
        try:
            return await asyncio.to_thread(self._reader.untrained, payload, summary, window, note=note)
        except DecodeError as error:
            msg = f"trajectory {trajectory_id}: its {len(payload)} bytes are no trajectory; `sao dead show` has more"
            raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, msg) from error

    async def _dead(self, trajectory_id: str) -> tuple[TrajectorySummary, str]:
        letters = await self._streams.dead_letters(count=MAX_LETTERS_SEARCHED)
        for letter in filter(with_ids([trajectory_id]), letters):
            note = f"a dead letter: {letter.reason[: views.MAX_REASON]}"
            return summary_of_entry(trajectory_id, letter.fields, "dead"), note
        note = "in the store, and not among the newest of its streams: it waits, or is an older dead letter"
        return summary_of_entry(trajectory_id, {}, "waiting"), note

    async def _read_on(self) -> None:
        async with self._reading:
            with _problems():
                await asyncio.to_thread(self._history.poll)


class _Fresh:
    """One answer for everybody who asks within FRESH_S: many viewers cost the board no more than one."""

    def __init__(self, ask: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = asyncio.Lock()
        self._answer: Any = None
        self._until = -1.0

    async def get(self) -> Any:  # noqa: ANN401 - whatever `ask` gives
        async with self._lock:
            if self._clock() >= self._until:
                self._answer = await self._ask()
                self._until = self._clock() + FRESH_S
            return self._answer


@contextmanager
def _problems() -> Iterator[None]:
    """What is wrong with a run's folder as an answer."""
    try:
        yield
    except PlaceError as error:
        raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
    except ValidationError as error:
        msg = f"the run's updates.jsonl or served.jsonl holds a line that is no row: {error.errors()[0]['msg']}"
        raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, msg) from error
    except (OSError, ArchiveError) as error:
        msg = f"the run's folder cannot be read: {error}"
        raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, msg, headers={"Retry-After": "1"}) from error
