"""The answers that every process gives, whatever server they come from: /metrics, /healthz and /readyz."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from sao.telemetry.health import Health

TELEMETRY_PATHS = ("/metrics", "/healthz", "/readyz")


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP response."""

    status: int
    content_type: str
    body: bytes


def answer(path: str, health: Health, registry: CollectorRegistry = REGISTRY) -> Answer:
    """What GET `path` gives: metrics as text, health as 200 or 503 with a sentence, 404 for anything else."""
    match path.partition("?")[0]:
        case "/metrics":
            return Answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
        case "/healthz":
            return _state(*health.alive())
        case "/readyz":
            return _state(*health.ready())
        case _:
            return Answer(404, "text/plain; charset=utf-8", b"not found; there are /metrics, /healthz and /readyz\n")


def _state(good: bool, sentence: str) -> Answer:
    return Answer(200 if good else 503, "text/plain; charset=utf-8", f"{sentence}\n".encode())
