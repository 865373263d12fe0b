"""Holding every change (/v1/preferences:hold, :resume), and switches that are to come (/v1/preferences/schedule).

A scheduled switch takes effect once, on whichever replica looks first, within a second of its time or update.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sao.preference import Finite, PreferenceDocument
from sao.preference_changes import ChangeRequest, Hold, ScheduledPreference
from sao.problems import body_of, bounded_body, malformed, problems
from services.reward.preferences.changes import (
    MAX_BODY_BYTES,
    PATH,
    REFUSALS,
    AuthorQuery,
    Changes,
    ReasonQuery,
    client_of,
    if_match,
)

EARLIEST_S, LATEST_S = -60.0, 366 * 86400.0
"""How far from now a switch may be timed: beyond that, the time is not in Unix seconds."""
_LARGEST = 2**53

SwitchId = Annotated[int, Path(ge=1, le=_LARGEST)]


class SwitchRequest(BaseModel):
    """A document, and when it shall become current: exactly one of `at_s` and `at_update`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    document: PreferenceDocument
    at_s: Finite | None = None
    """Unix seconds."""
    at_update: Annotated[int, Field(ge=0, le=_LARGEST)] | None = None
    """As soon as the trainer has made this update."""

    @model_validator(mode="after")
    def _when(self) -> SwitchRequest:
        if (self.at_s is None) == (self.at_update is None):
            msg = "give exactly one of at_s and at_update"
            raise ValueError(msg)
        ahead_s = self.at_s - time.time() if self.at_s is not None else 0.0
        if not EARLIEST_S <= ahead_s <= LATEST_S:
            msg = f"at_s lies {ahead_s:.0f} s ahead; give Unix seconds from now on, at most a year ahead"
            raise ValueError(msg)
        return self


class Schedule(BaseModel):
    """The switches that wait."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    scheduled: list[ScheduledPreference]
    """In the order in which they were asked for."""


class SteeringRoutes:
    """The routes over one run's preferences."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._board = changes.board

    def router(self) -> APIRouter:
        router, schedule = APIRouter(), f"{PATH}/schedule"
        invalid = HTTPStatus.UNPROCESSABLE_ENTITY
        router.add_api_route(f"{PATH}/hold", self.held, methods=["GET"], responses=problems())
        router.add_api_route(f"{PATH}:hold", self.hold, methods=["POST"], responses=problems(invalid))
        router.add_api_route(f"{PATH}:resume", self.resume, methods=["POST"], responses=problems(invalid))
        router.add_api_route(schedule, self.scheduled, methods=["GET"], responses=problems())
        router.add_api_route(
            schedule,
            self.schedule,
            methods=["POST"],
            status_code=HTTPStatus.CREATED,
            openapi_extra=body_of(SwitchRequest),
            responses=problems(HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, *REFUSALS),
        )
        router.add_api_route(
            f"{schedule}/{{switch}}",
            self.cancel,
            methods=["DELETE"],
            status_code=HTTPStatus.NO_CONTENT,
            response_class=Response,
            responses=problems(HTTPStatus.NOT_FOUND, invalid),
        )
        return router

    async def held(self) -> Hold:
        """Whether changes are held."""
        return await self._board.preference_hold()

    async def hold(self, request: Request, author: AuthorQuery = "", reason: ReasonQuery = "") -> Hold:
        """Refuse every change with 423, and let scheduled ones wait, until `:resume`."""
        asked = ChangeRequest(what="hold", author=author, reason=reason, client=client_of(request))
        return Hold.of(await self._changes.make(asked))

    async def resume(self, request: Request, author: AuthorQuery = "", reason: ReasonQuery = "") -> Hold:
        """Let changes go on; scheduled ones that have become due meanwhile take effect at once."""
        asked = ChangeRequest(what="resume", author=author, reason=reason, client=client_of(request))
        await self._changes.make(asked)
        return Hold(held=False)

    async def scheduled(self) -> Schedule:
        """The switches that wait."""
        return Schedule(scheduled=await self._board.scheduled_preferences())

    async def schedule(
        self, request: Request, author: AuthorQuery = "", reason: ReasonQuery = ""
    ) -> ScheduledPreference:
        """Let a document become current later; with If-Match only if that version is still current then."""
        if_version = if_match(request)
        body = await bounded_body(request, MAX_BODY_BYTES, "a scheduled switch")
        try:
            switch = SwitchRequest.model_validate_json(body)
        except ValidationError as error:
            raise malformed(error) from error
        self._changes.check(switch.document)
        asked = ChangeRequest(
            what="schedule",
            author=author,
            reason=reason,
            client=client_of(request),
            document=switch.document,
            if_version=if_version,
            at_s=switch.at_s,
            at_update=switch.at_update,
        )
        change = await self._changes.make(asked)
        assert change is not None
        return ScheduledPreference.of(change)

    async def cancel(
        self, request: Request, switch: SwitchId, author: AuthorQuery = "", reason: ReasonQuery = ""
    ) -> None:
        """Forget a switch that waits."""
        asked = ChangeRequest(what="cancel", author=author, reason=reason, client=client_of(request), switch=switch)
        await self._changes.make(asked)
