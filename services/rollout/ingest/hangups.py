"""Clients that hang up just before their answer are no failure of the service, whatever gRPC's log makes of them."""

from __future__ import annotations

import logging

import grpc.aio

LOGGER = "grpc._cython.cygrpc"
"""Where gRPC writes what its server meets."""


class HangUps(logging.Filter):
    """Turns its errors with a traceback about an answer that nobody takes into a line at level info."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, grpc.aio.InternalError):
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
            record.msg, record.args, record.exc_info = "client hung up before its answer", None, None
        return True
