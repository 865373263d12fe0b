"""Errors as application/problem+json (RFC 9457), whoever raised them."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from sao.streams.base import StreamError


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


def install(app: FastAPI) -> None:
    """Make every error of `app` a problem document."""

    async def on_problem(request: Request, error: Exception) -> JSONResponse:
        return _response(request, error if isinstance(error, ProblemError) else _translated(error))

    for kind in (ProblemError, HTTPException, RequestValidationError, StreamError, ClientDisconnect):
        app.add_exception_handler(kind, on_problem)


def _translated(error: Exception) -> ProblemError:
    if isinstance(error, HTTPException):
        headers = dict(error.headers) if error.headers else None
        return ProblemError(HTTPStatus(error.status_code), str(error.detail), headers=headers)
    if isinstance(error, RequestValidationError):
        found = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
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
