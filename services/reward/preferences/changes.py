"""Asking for a change of the preferences over REST: who asks and why, what is refused, and how a refusal reads."""

from __future__ import annotations

import math
import re
from http import HTTPStatus
from typing import Annotated

from fastapi import Query, Request
from pydantic import ValidationError

from sao.board.base import (
    Board,
    BoardBehindError,
    PreferenceConflictError,
    PreferenceLimitError,
    PreferencesHeldError,
    ScheduleFullError,
    UnknownSwitchError,
)
from sao.config.schema import PreferenceBounds
from sao.preference import PreferenceDocument
from sao.preference_changes import ChangeRequest, PreferenceChange
from sao.problems import ProblemError, bounded_body, malformed
from sao.telemetry.logs import get_logger
from services.reward import metrics
from services.reward.catalogue import Computes
from services.reward.preferences.folder import Keeper, LostChangeError

MAX_BODY_BYTES = 64 * 1024
PATH = "/v1/preferences"
AuthorQuery = Annotated[str, Query(max_length=64, description="Who asks; kept with the change.")]
ReasonQuery = Annotated[str, Query(max_length=500, description="Why; kept with the change.")]

REFUSALS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.PRECONDITION_FAILED,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.LOCKED,
    HTTPStatus.TOO_MANY_REQUESTS,
)
"""What whoever asks for a new version can be answered."""

log = get_logger(__name__)


def unknown_components(document: PreferenceDocument, run: Computes) -> list[str]:
    """Components the document reads and the run does not compute."""
    return sorted(document.components - run.components)


class Changes:
    """Changes of one run's preferences; a refusal is a ProblemError."""

    def __init__(self, board: Board, run: Computes, keeper: Keeper, bounds: PreferenceBounds) -> None:
        self.board = board
        self._run = run
        self._keeper = keeper
        self._bounds = bounds

    async def make(self, asked: ChangeRequest) -> PreferenceChange | None:
        """Make it, durable on return; None when there was nothing to do."""
        try:
            change = await self._make(asked)
        except ProblemError as error:
            metrics.PREFERENCE_REFUSALS.labels(error.status.value).inc()
            raise
        if change is not None:
            metrics.PREFERENCE_CHANGES.labels(change.what).inc()
            log.info("preference change", **change.model_dump(mode="json", exclude_none=True, exclude={"document"}))
        return change

    async def _make(self, asked: ChangeRequest) -> PreferenceChange | None:
        try:
            return await self._keeper.change(asked)
        except PreferenceConflictError as error:
            raise ProblemError(HTTPStatus.PRECONDITION_FAILED, str(error)) from error
        except PreferencesHeldError as error:
            extra: dict[str, object] = {"hold": error.hold.model_dump(mode="json")}
            raise ProblemError(HTTPStatus.LOCKED, f"{error} (POST {PATH}:resume)", extra=extra) from error
        except PreferenceLimitError as error:
            headers = {"Retry-After": str(max(math.ceil(error.wait_s), 1))}
            detail = f"{error} (reward.preference_min_seconds)"
            raise ProblemError(HTTPStatus.TOO_MANY_REQUESTS, detail, headers=headers) from error
        except ScheduleFullError as error:
            raise ProblemError(HTTPStatus.CONFLICT, str(error)) from error
        except UnknownSwitchError as error:
            raise ProblemError(HTTPStatus.NOT_FOUND, error.args[0]) from error
        except (BoardBehindError, LostChangeError) as error:
            raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), headers={"Retry-After": "1"}) from error

    async def document(self, request: Request) -> PreferenceDocument:
        """The body as a document that may become a version."""
        body = await bounded_body(request, MAX_BODY_BYTES, "a preference document")
        try:
            document = PreferenceDocument.model_validate_json(body)
        except ValidationError as error:
            raise malformed(error) from error
        self.check(document)
        return document

    def check(self, document: PreferenceDocument) -> None:
        """Refuse what reads components that nobody computes, or lies outside the run's bounds."""
        if unknown := unknown_components(document, self._run):
            known = sorted(self._run.components)
            msg = f"task {self._run.name} does not compute {', '.join(unknown)}; it computes {', '.join(known)}"
            extra: dict[str, object] = {"unknown_components": unknown, "components": known}
            raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, msg, extra=extra)
        if (broken := self._bounds.broken_by(document)) is not None:
            bound, msg = broken
            raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, msg, extra={"bound": bound})


def if_match(request: Request) -> int | None:
    """The version that an If-Match demands; `*` demands nothing, since there always is one."""
    header = request.headers.get("if-match")
    if header is None or header.strip() == "*":
        return None
    match = re.fullmatch(r'\s*"([0-9]{1,15})"\s*', header)
    if match is None:
        msg = f'If-Match is {header!r}; send the ETag of GET {PATH}, for example "3"'
        raise ProblemError(HTTPStatus.BAD_REQUEST, msg)
    return int(match[1])


def client_of(request: Request) -> str:
    """Address of whoever sent it; empty when unknown."""
    return request.client.host if request.client else ""
