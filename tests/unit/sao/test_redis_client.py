"""The client's bounds."""

from __future__ import annotations

from sao.config.schema import RedisSection
from sao.redis_client import connect_redis
from services.rollout.ingest.app import _MOST_CALLS


async def test_every_call_that_ingest_takes_may_have_a_connection() -> None:
    client = connect_redis(RedisSection())
    try:
        assert client.connection_pool.max_connections >= _MOST_CALLS
    finally:
        await client.aclose()
