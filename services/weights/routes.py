"""The REST routes under /v1: looking, and the operator's `:activate`, `:hold` and `:resume`.

When a POST has answered 200, what it asked is on disk and is the fleet's target; engines follow round by round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sao.board.base import EngineFacts
from sao.problems import ProblemError, body_of, bounded_body, malformed, problems
from sao.weights.base import UnknownVersionError, VersionStoreError
from services.weights import views
from services.weights.fleet import Fleet
from services.weights.keeper import Keeper
from services.weights.operator import CannotServeError, Operator

MAX_BODY_BYTES = 4096
PATH = "/v1/weights"


class Reason(BaseModel):
    """Why somebody asks; kept with the hold and in the log."""

    model_config = ConfigDict(extra="forbid", strict=True)

    reason: Annotated[str, Field(max_length=500)] = ""


class WeightRoutes:
    """The routes over one fleet."""

    def __init__(self, fleet: Fleet, keepers: Sequence[Keeper]) -> None:
        self._fleet = fleet
        self._keepers = keepers
        self._operator = Operator(fleet)

    def router(self) -> APIRouter:
        router = APIRouter()
        looked = problems()
        asked = problems(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
        named = asked | problems(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)
        router.add_api_route("/v1/versions", self.versions, methods=["GET"], responses=looked)
        router.add_api_route("/v1/engines", self.engines, methods=["GET"], responses=looked)
        router.add_api_route(PATH, self.weights, methods=["GET"], responses=looked)
        body = body_of(Reason, required=False)
        one = f"{PATH}/{{version}}"
        router.add_api_route(f"{one}:activate", self.activate, methods=["POST"], openapi_extra=body, responses=named)
        router.add_api_route(f"{one}:hold", self.hold, methods=["POST"], openapi_extra=body, responses=named)
        router.add_api_route(f"{PATH}:resume", self.resume, methods=["POST"], openapi_extra=body, responses=asked)
        return router

    async def versions(self) -> list[views.VersionView]:
        """Every stored version, oldest first."""
        with _as_problems():
            return await asyncio.to_thread(views.version_views, self._fleet)

    async def engines(self) -> list[EngineFacts]:
        """Every engine, with its state and what it serves."""
        return [keeper.facts for keeper in self._keepers]

    async def weights(self) -> views.WeightsView:
        """Versions, engines, and whether publishing is held."""
        with _as_problems():
            return await asyncio.to_thread(views.weights_view, self._fleet, await self.engines())

    async def activate(self, version: str, request: Request) -> views.FleetView:
        """Bring every engine to this version, older or newer; newer ones wait until `:resume`."""
        return await self._do(
            request, lambda reason, client: self._operator.activate(version, reason=reason, client=client)
        )

    async def hold(self, version: str, request: Request) -> views.FleetView:
        """Never roll this version out; newer ones wait too, until `:resume`."""
        return await self._do(
            request, lambda reason, client: self._operator.hold(version, reason=reason, client=client)
        )

    async def resume(self, request: Request) -> views.FleetView:
        """Let publishing go on with the newest version that no operator holds."""
        return await self._do(request, lambda reason, client: self._operator.resume(reason=reason, client=client))

    async def _do(self, request: Request, what: Callable[[str, str], Awaitable[None]]) -> views.FleetView:
        reason = await _reason(request)
        client = request.client.host if request.client else ""
        with _as_problems():
            await what(reason, client)
        return views.fleet_view(self._fleet)


async def _reason(request: Request) -> str:
    body = await bounded_body(request, MAX_BODY_BYTES, "a reason")
    try:
        return Reason.model_validate_json(body).reason if body.strip() else ""
    except ValidationError as error:
        raise malformed(error) from error


@contextmanager
def _as_problems() -> Iterator[None]:
    try:
        yield
    except UnknownVersionError as error:
        raise ProblemError(HTTPStatus.NOT_FOUND, f"{error}; GET {PATH} lists those there are") from error
    except CannotServeError as error:
        raise ProblemError(HTTPStatus.CONFLICT, str(error)) from error
    except (VersionStoreError, OSError) as error:
        detail = f"the version store does not answer ({error}); read GET {PATH} before you repeat"
        raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, detail, headers={"Retry-After": "1"}) from error
