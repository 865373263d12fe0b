"""One Chromium for the tests of a file that look at the console."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.support.browser import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def artefacts(tmp_path: Path) -> Path:
    """Where a test's pictures go."""
    return tmp_path / "test-artifacts"
