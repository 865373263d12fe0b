"""Errors of a REST interface as application/problem+json (RFC 9457), whoever raised them."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from sao.streams.base import StreamError

BODY_WITHIN_S = 30.0
"""A client that sends its body more slowly is refused: it may hold a place that others wait for."""


class Problem(BaseModel):
    """What every error answers; some have members beside these."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    title: str
    status: int
    detail: str
    instance: str


def problems(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route behind the token: these problem documents, and 401 and 503, which all can answer.

    Say UNPROCESSABLE_ENTITY where the route has parameters or a body: FastAPI documents another schema otherwise.
    """
    content = {"application/problem+json": {"schema": Problem.model_json_schema()}}
    common = (HTTPStatus.UNAUTHORIZED, HTTPStatus.SERVICE_UNAVAILABLE)
    return {status.value: {"description": status.phrase, "content": content} for status in (*statuses, *common)}


def body_of(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """`openapi_extra=` of a route that reads its body itself, bounded, as JSON of this model."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def answers(model: type[BaseModel], description: str = "OK") -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route that writes its 200 itself, as JSON of this model."""
    schema = model.model_json_schema(mode="serialization")
    return {200: {"description": description, "content": {"application/json": {"schema": schema}}}}


class ProblemError(Exception):
    """An answer with an error status; `extra` holds members beside the standard ones."""

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        *,
        headers: dict[str, str] | None = None,
        extra: dict[str, object] | None = None,
    ) -> None:
        self.status = status
        self.detail = detail
        self.headers = headers
        self.extra = extra or {}
        super().__init__(detail)


class Bearer:
    """Refuses requests without the run's token; lets everything pass when the run has none."""

    def __init__(self, token: SecretStr | None) -> None:
        self._expected = f"Bearer {token.get_secret_value()}".encode() if token else None

    async def __call__(self, request: Request) -> None:
        found = request.headers.get("authorization", "").encode()
        if self._expected is not None and not hmac.compare_digest(found, self._expected):
            headers = {"WWW-Authenticate": "Bearer"}
            raise ProblemError(HTTPStatus.UNAUTHORIZED, "send Authorization: Bearer <auth.token>", headers=headers)


def install(app: Starlette, invalid: type[Exception]) -> None:
    """Make every error of `app` a problem document; `invalid` is FastAPI's RequestValidationError, unknown here."""

    async def on_problem(request: Request, error: Exception) -> JSONResponse:
        return _response(request, error if isinstance(error, ProblemError) else _translated(error, invalid))

    for kind in (ProblemError, HTTPException, invalid, StreamError, ClientDisconnect):
        app.add_exception_handler(kind, on_problem)


async def bounded_body(request: Request, limit: int, what: str) -> bytes:
    """The body, at most `limit` bytes, within BODY_WITHIN_S; `what` names it in the refusal."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise ProblemError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{what} has at most {limit} bytes")
    except TimeoutError as error:
        detail = f"{what} did not arrive whole within {BODY_WITHIN_S:g} s"
        raise ProblemError(HTTPStatus.BAD_REQUEST, detail) from error
    return bytes(body)


def malformed(error: ValidationError) -> ProblemError:
    """What is wrong with a document, by JSON pointer."""
    errors = [{"pointer": _pointer(item["loc"]), "detail": item["msg"]} for item in error.errors(include_url=False)]
    detail = "; ".join(f"{item['pointer'] or 'document'}: {item['detail']}" for item in errors)
    return ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, detail, extra={"errors": errors})


def _pointer(path: Iterable[int | str]) -> str:
    return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in path)


def _translated(error: Exception, invalid: type[Exception]) -> ProblemError:
    if isinstance(error, HTTPException):
        headers = dict(error.headers) if error.headers else None
        return ProblemError(HTTPStatus(error.status_code), str(error.detail), headers=headers)
    if isinstance(error, invalid):
        found = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())  # type: ignore[attr-defined]
        return ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, found)
    if isinstance(error, ClientDisconnect):
        return ProblemError(HTTPStatus.BAD_REQUEST, "the client hung up in the middle of its request")
    detail = f"the store does not answer ({error}); nothing was changed for certain, read before you repeat"
    return ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, detail, headers={"Retry-After": "1"})


def _response(request: Request, problem: ProblemError) -> JSONResponse:
    body = {
        "type": "about:blank",
        "title": problem.status.phrase,
        "status": problem.status.value,
        "detail": problem.detail,
        "instance": request.url.path,
        **problem.extra,
    }
    return JSONResponse(body, problem.status.value, problem.headers, media_type="application/problem+json")
