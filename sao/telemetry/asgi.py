"""/metrics, /healthz and /readyz as an ASGI application, mounted at "/" after a service's own routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry

from sao.telemetry.health import Health
from sao.telemetry.routes import Answer, answer

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


def telemetry_asgi(health: Health, registry: CollectorRegistry = REGISTRY) -> AsgiApp:
    """An ASGI application that answers the three paths, 404 for others and 405 for other methods than GET and HEAD."""

    async def app(
        scope: Message,
        _receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            msg = f"telemetry serves http, not {scope['type']}"
            raise RuntimeError(msg)
        # A mount leaves the full path in `path` and its own prefix in `root_path`.
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        reply = answer(path, health, registry)
        if reply.status != 404 and scope["method"] not in {"GET", "HEAD"}:
            reply = Answer(405, "text/plain; charset=utf-8", b"method not allowed; use GET\n")
        headers = [
            (b"content-type", reply.content_type.encode()),
            (b"content-length", str(len(reply.body)).encode()),
        ]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else reply.body})

    return app
