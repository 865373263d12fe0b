"""gRPC's complaints about clients that hang up lose their level and traceback; all others keep theirs."""

from __future__ import annotations

import logging

import grpc.aio
import pytest

from services.rollout.ingest.hangups import LOGGER, HangUps


@pytest.mark.parametrize(
    ("error", "level", "message"),
    [
        (grpc.aio.InternalError("Failed execute_batch"), logging.INFO, "client hung up before its answer"),
        (ValueError("ours"), logging.ERROR, "raised by servicer method [Publish]"),
    ],
)
def test_only_an_answer_that_nobody_takes_is_no_error(
    caplog: pytest.LogCaptureFixture, error: Exception, level: int, message: str
) -> None:
    logger, hang_ups = logging.getLogger(LOGGER), HangUps()
    logger.addFilter(hang_ups)
    try:
        with caplog.at_level(logging.INFO):
            logger.error("raised by servicer method [%s]", "Publish", exc_info=error)
    finally:
        logger.removeFilter(hang_ups)
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (level, message)
    assert bool(record.exc_info) == (level == logging.ERROR)
