"""Keeps logs out of the tests' time: rendering a traceback on a busy machine takes longer than scoring."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs


@pytest.fixture(autouse=True)
def _quiet_logs() -> Iterator[None]:
    with capture_logs():
        yield
