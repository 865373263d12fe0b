"""GET and PUT /v1/preferences: what is rewarded now, changed while everything runs, tried first, and taken back.

An ETag is the preference version in quotes. When PUT has answered 200 the new version is current on the board and
durable: every scoring that starts afterwards carries it or a later one.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi import Path as PathParameter
from pydantic import BaseModel, ConfigDict

from sao.board.base import Board, PreferenceConflictError
from sao.config import ConfigError
from sao.config.schema import PreferenceBounds
from sao.preference import Preference, PreferenceDocument
from sao.preference_changes import ChangeRequest, stored_by
from sao.problems import ProblemError, answers, body_of, problems
from services.reward import metrics
from services.reward.catalogue import Computes
from services.reward.preferences.archived import newest_archived
from services.reward.preferences.changes import (
    PATH,
    REFUSALS,
    AuthorQuery,
    Changes,
    ReasonQuery,
    client_of,
    if_match,
    unknown_components,
)
from services.reward.preferences.dry_run import DryRun, dry_run
from services.reward.preferences.folder import Keeper
from services.reward.preferences.steering import SteeringRoutes
from services.reward.retry import patiently

MAX_HISTORY = 200
MAX_DRY_RUN = 1000
"""Trajectories that one dry run compares at most."""
_LARGEST = 2**53

Version = Annotated[int, PathParameter(ge=-_LARGEST, le=_LARGEST)]
Before = Annotated[int | None, Query(ge=1, le=_LARGEST, description="Only versions below this.")]
Limit = Annotated[int, Query(ge=1, le=MAX_HISTORY)]
Last = Annotated[int, Query(ge=1, le=MAX_DRY_RUN, description="Trajectories, the newest that were trained on.")]


async def ensure_preference(
    board: Board, configured: PreferenceDocument | None, run: Computes, bounds: PreferenceBounds | None = None
) -> Preference:
    """The current preference; when the run has none yet, `configured` or the task's default becomes version 1.

    Raises ConfigError when it reads components that the run does not compute, or a first one breaks the bounds.
    """
    current = await patiently(board.preference)
    document = current.document if current else configured or run.default_preference
    if unknown := unknown_components(document, run):
        origin = f"version {current.version} of this run" if current else "the run file's preference"
        msg = f"{origin} reads {unknown}, task {run.name} computes {sorted(run.components)}"
        raise ConfigError(key="preference", message=msg)
    if current is None:
        if bounds is not None and (broken := bounds.broken_by(document)) is not None:
            raise ConfigError(key="preference", message=broken[1])
        asked = ChangeRequest(what="initial", document=document, if_version=0)
        try:
            current = stored_by(await patiently(lambda: board.change_preferences(asked)))
        except PreferenceConflictError:
            return await ensure_preference(board, configured, run, bounds)
    metrics.PREFERENCE_VERSION.set(current.version)
    return current


class History(BaseModel):
    """Versions, newest first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preferences: list[Preference]


class PreferenceRoutes:
    """The routes over one board; `archive` is where the trainer keeps what it trained on."""

    def __init__(self, board: Board, run: Computes, keeper: Keeper, bounds: PreferenceBounds, archive: Path) -> None:
        self._board = board
        self._changes = Changes(board, run, keeper, bounds)
        self._archive = archive

    def router(self) -> APIRouter:
        router = APIRouter()
        missing, invalid = HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY
        too_large = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        given, one, body = answers(Preference), f"{PATH}/{{version}}", body_of(PreferenceDocument)
        unchanged = {304: {"description": "If-None-Match names the current version"}}
        router.add_api_route(PATH, self.current, methods=["GET"], responses=given | unchanged | problems(missing))
        router.add_api_route(
            PATH, self.put, methods=["PUT"], openapi_extra=body, responses=given | problems(too_large, *REFUSALS)
        )
        router.add_api_route(f"{PATH}/history", self.history, methods=["GET"], responses=problems(invalid))
        router.add_api_route(
            f"{PATH}:dry-run",
            self.dry_run,
            methods=["POST"],
            openapi_extra=body,
            responses=problems(missing, too_large, invalid),
        )
        router.include_router(SteeringRoutes(self._changes).router())
        router.add_api_route(one, self.by_version, methods=["GET"], responses=given | problems(missing, invalid))
        router.add_api_route(
            f"{one}:rollback", self.rollback, methods=["POST"], responses=given | problems(missing, *REFUSALS)
        )
        return router

    async def current(self, request: Request) -> Response:
        """The current preference."""
        preference = await self._current()
        if request.headers.get("if-none-match") == _etag(preference):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"ETag": _etag(preference)})
        return _answer(preference)

    async def by_version(self, version: Version) -> Response:
        """The preference of one version; versions count from 1."""
        return _answer(await self._of(version))

    async def history(self, before: Before = None, limit: Limit = 50) -> History:
        """Versions, newest first, who made them and why; go on with `before` = the last one's version."""
        return History(preferences=await self._board.preferences(before=before, limit=limit))

    async def put(self, request: Request, author: AuthorQuery = "", reason: ReasonQuery = "") -> Response:
        """Store a document as the next version; with If-Match only when that version is still the current one."""
        if_version = if_match(request)
        document = await self._changes.document(request)
        asked = ChangeRequest(
            what="put",
            author=author,
            reason=reason,
            client=client_of(request),
            document=document,
            if_version=if_version,
        )
        return await self._store(asked)

    async def rollback(
        self, request: Request, version: Version, author: AuthorQuery = "", reason: ReasonQuery = ""
    ) -> Response:
        """Store an older version's document as the next version."""
        if_version = if_match(request)
        older = await self._of(version)
        self._changes.check(older.document)
        asked = ChangeRequest(
            what="rollback",
            author=author,
            reason=reason,
            client=client_of(request),
            document=older.document,
            restores=version,
            if_version=if_version,
        )
        return await self._store(asked)

    async def dry_run(self, request: Request, last: Last = 200) -> DryRun:
        """What a document would change for the newest trajectories that were trained on; nothing is stored."""
        document = await self._changes.document(request)
        current = await self._current()
        return await asyncio.to_thread(self._dry_run, current, document, last)

    def _dry_run(self, current: Preference, document: PreferenceDocument, last: int) -> DryRun:
        archived, unreadable = newest_archived(self._archive, last)
        found = dry_run(archived, current.document, document, version=current.version, asked=last)
        return found.model_copy(update={"unreadable": unreadable})

    async def _store(self, asked: ChangeRequest) -> Response:
        stored = stored_by(await self._changes.make(asked))
        metrics.PREFERENCE_VERSION.set(stored.version)
        return _answer(stored)

    async def _current(self) -> Preference:
        preference = await self._board.preference()
        if preference is None:
            raise ProblemError(HTTPStatus.NOT_FOUND, "no preference is stored yet; PUT one")
        return preference

    async def _of(self, version: int) -> Preference:
        preference = await self._board.preference(version) if version >= 1 else None
        if preference is None:
            raise ProblemError(HTTPStatus.NOT_FOUND, f"there is no preference version {version}")
        return preference


def _etag(preference: Preference) -> str:
    return f'"{preference.version}"'


def _answer(preference: Preference) -> Response:
    headers = {"ETag": _etag(preference), "Cache-Control": "no-cache"}
    return Response(preference.model_dump_json(), headers=headers, media_type="application/json")
