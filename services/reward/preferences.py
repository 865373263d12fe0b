"""GET and PUT /v1/preferences: what is rewarded now, changed while everything runs.

An ETag is the preference version in quotes. When PUT has answered 200 the new version is current on the board:
every scoring that starts afterwards carries it.
"""

from __future__ import annotations

import re
from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from sao.board.base import Board, PreferenceConflictError
from sao.config import ConfigError
from sao.preference import Preference, PreferenceDocument
from sao.problems import ProblemError, answers, body_of, bounded_body, malformed, problems
from sao.tasks.base import Task
from sao.telemetry.logs import get_logger
from services.reward import metrics
from services.reward.preference_folder import Keeper
from services.reward.retry import patiently

MAX_BODY_BYTES = 64 * 1024
PATH = "/v1/preferences"

log = get_logger(__name__)


def unknown_components(document: PreferenceDocument, components: frozenset[str]) -> list[str]:
    """Components the document reads and the run does not have."""
    return sorted(document.components - components)


async def ensure_preference(
    board: Board, configured: PreferenceDocument | None, task: Task, late: frozenset[str] = frozenset()
) -> Preference:
    """The current preference; when the run has none yet, `configured` or the task's default becomes version 1.

    Raises ConfigError when it reads components that neither the task computes nor `late` names.
    """
    current = await patiently(board.preference)
    document = current.document if current else configured or task.default_preference
    if unknown := unknown_components(document, task.components | late):
        origin = f"version {current.version} of this run" if current else "the run file's preference"
        msg = f"{origin} reads {unknown}, task {task.name} computes {sorted(task.components | late)}"
        raise ConfigError(key="preference", message=msg)
    if current is None:
        try:
            current = await patiently(lambda: board.put_preference(document, if_version=0))
        except PreferenceConflictError:
            return await ensure_preference(board, configured, task, late)
    metrics.PREFERENCE_VERSION.set(current.version)
    return current


class PreferenceRoutes:
    """The three routes over one board."""

    def __init__(self, board: Board, task: Task, keeper: Keeper, late: frozenset[str] = frozenset()) -> None:
        """`late`: components beside the task's own."""
        self._board = board
        self._task = task
        self._components = task.components | late
        self._keeper = keeper

    def router(self) -> APIRouter:
        router = APIRouter()
        missing, invalid = HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY
        given = answers(Preference)
        unchanged = {304: {"description": "If-None-Match names the current version"}}
        router.add_api_route(PATH, self.current, methods=["GET"], responses=given | unchanged | problems(missing))
        router.add_api_route(
            f"{PATH}/{{version}}", self.by_version, methods=["GET"], responses=given | problems(missing, invalid)
        )
        refused = problems(
            HTTPStatus.BAD_REQUEST, HTTPStatus.PRECONDITION_FAILED, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, invalid
        )
        body = body_of(PreferenceDocument)
        router.add_api_route(PATH, self.put, methods=["PUT"], openapi_extra=body, responses=given | refused)
        return router

    async def current(self, request: Request) -> Response:
        """The current preference."""
        preference = await self._board.preference()
        if preference is None:
            raise ProblemError(HTTPStatus.NOT_FOUND, "no preference is stored yet; PUT one")
        if request.headers.get("if-none-match") == _etag(preference):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"ETag": _etag(preference)})
        return _answer(preference)

    async def by_version(self, version: int) -> Response:
        """The preference of one version; versions count from 1."""
        preference = await self._board.preference(version) if version >= 1 else None
        if preference is None:
            raise ProblemError(HTTPStatus.NOT_FOUND, f"there is no preference version {version}")
        return _answer(preference)

    async def put(self, request: Request) -> Response:
        """Store a document as the next version; with If-Match only when that version is still the current one."""
        if_version = _if_match(request.headers.get("if-match"))
        document = await self._document(request)
        await self._keeper.once()  # a board that was emptied would count from 1 again
        try:
            stored = await self._board.put_preference(document, if_version=if_version)
        except PreferenceConflictError as error:
            raise ProblemError(HTTPStatus.PRECONDITION_FAILED, str(error)) from error
        await self._keeper.once()
        if await self._board.preference(stored.version) != stored:
            msg = f"the store lost version {stored.version} while it was stored; read the preference, then repeat"
            raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, msg, headers={"Retry-After": "1"})
        metrics.PREFERENCE_VERSION.set(stored.version)
        metrics.PREFERENCE_CHANGES.inc()
        client = request.client.host if request.client else ""
        log.info("preference changed", version=stored.version, preference=document.model_dump(), client=client)
        return _answer(stored)

    async def _document(self, request: Request) -> PreferenceDocument:
        body = await bounded_body(request, MAX_BODY_BYTES, "a preference document")
        try:
            document = PreferenceDocument.model_validate_json(body)
        except ValidationError as error:
            raise malformed(error) from error
        if unknown := unknown_components(document, self._components):
            known = sorted(self._components)
            msg = f"task {self._task.name} does not compute {', '.join(unknown)}; it computes {', '.join(known)}"
            extra: dict[str, object] = {"unknown_components": unknown, "components": known}
            raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, msg, extra=extra)
        return document


def _if_match(header: str | None) -> int | None:
    """The version an If-Match demands; `*` demands nothing, since there always is one."""
    if header is None or header.strip() == "*":
        return None
    match = re.fullmatch(r'\s*"([0-9]{1,15})"\s*', header)
    if match is None:
        msg = f'If-Match is {header!r}; send the ETag of GET {PATH}, for example "3"'
        raise ProblemError(HTTPStatus.BAD_REQUEST, msg)
    return int(match[1])


def _etag(preference: Preference) -> str:
    return f'"{preference.version}"'


def _answer(preference: Preference) -> Response:
    headers = {"ETag": _etag(preference), "Cache-Control": "no-cache"}
    return Response(preference.model_dump_json(), headers=headers, media_type="application/json")
