"""The page itself: the files of `static`, read once, served under /console with a policy that lets nothing else in.

They hold no data of the run, so they need no token; what they fetch does.
"""

from __future__ import annotations

import hashlib
from http import HTTPStatus
from importlib import resources

from fastapi import APIRouter, Request, Response

from sao.problems import ProblemError

PATH = "/console"
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def pages() -> APIRouter:
    """Routes of the page and its files."""
    folder = resources.files("services.reward.console") / "static"
    files = {one.name: one.read_bytes() for one in folder.iterdir() if one.name.rpartition(".")[2] in TYPES}
    router = APIRouter(include_in_schema=False)

    def answer(request: Request, name: str) -> Response:
        if name not in files:
            raise ProblemError(HTTPStatus.NOT_FOUND, f"the console has no file {name!r}; open {PATH}")
        etag = f'"{hashlib.sha256(files[name]).hexdigest()[:16]}"'
        headers = {**HEADERS, "ETag": etag}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(files[name], headers=headers, media_type=TYPES[name.rpartition(".")[2]])

    async def page(request: Request) -> Response:
        return answer(request, "index.html")

    async def file(request: Request, name: str) -> Response:
        return answer(request, name)

    router.add_api_route(PATH, page, methods=["GET", "HEAD"])
    router.add_api_route(f"{PATH}/{{name}}", file, methods=["GET", "HEAD"])
    return router
