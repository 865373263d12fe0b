"""Each boundary's twin and its real implementation, behind one fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.stores import Stores, open_stores


@pytest.fixture(params=["memory", "valkey"])
def store_url(request: pytest.FixtureRequest) -> str | None:
    """None for the in-memory twins, or the URL of a real Valkey."""
    if request.param == "memory":
        return None
    url: str = request.getfixturevalue("valkey_url")
    return url


@pytest.fixture
async def stores(store_url: str | None) -> AsyncIterator[Stores]:
    """Streams, board and leases of a fresh run."""
    async with open_stores(store_url) as opened:
        yield opened
