"""Traces of trajectories; `connect` gives the tracer that a run's settings name."""

from __future__ import annotations

from sao.config.errors import ConfigError
from sao.config.schema import RunConfig
from sao.telemetry.traces.base import (
    OFF,
    TRACEPARENT,
    Span,
    SpanContext,
    Tracer,
    carried,
    child,
    context_of,
    context_of_version,
    new_context,
)

__all__ = [
    "OFF",
    "TRACEPARENT",
    "Span",
    "SpanContext",
    "Tracer",
    "carried",
    "child",
    "connect",
    "context_of",
    "context_of_version",
    "new_context",
    "refuse_without_the_extra",
]


def connect(config: RunConfig, service: str) -> Tracer:
    """What records this process's spans: nothing without `traces.endpoint`; ConfigError without the extra for it."""
    if not config.traces.endpoint:
        return OFF
    refuse_without_the_extra(config)
    from sao.telemetry.traces.otlp import OtlpTracer

    return OtlpTracer(service, config.run.name, config.traces)


def refuse_without_the_extra(config: RunConfig) -> None:
    """ConfigError when spans are to be exported and what exports them is not installed."""
    if not config.traces.endpoint:
        return
    try:
        import sao.telemetry.traces.otlp  # noqa: F401
    except ImportError as error:
        message = (
            f"found {config.traces.endpoint!r}, and {error.name or error} is not installed: "
            "pip install 'sao[traces]', or leave it empty to trace nothing"
        )
        raise ConfigError(key="traces.endpoint", message=message) from error
