"""Structured logs: one JSON object a line on stderr, service and run on each; foreign loggers come out the same way."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

NOISY_LOGGERS = ("httpx", "httpcore", "uvicorn.access", "asyncio")
"""Loggers of libraries that report each request; only their warnings are kept."""


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger for events with key-value context: `log.info("trajectory published", trajectory=id)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def configure(service: str, run: str) -> None:
    """Send every log record of this process, structlog's and the standard library's, to stderr as JSON lines.

    May be called again, for example by tests; the last call wins.
    """

    def identify(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        event.setdefault("run", run)
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        identify,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
