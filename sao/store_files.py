"""The store's own files: after something was deleted they still hold it, until the server writes them anew."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from redis import asyncio as aioredis
from redis import exceptions

from sao.config.schema import RedisSection
from sao.redis_client import connect_redis, redis_errors

POLL_S: Final = 0.05


class StoreFilesError(RuntimeError):
    """The store's files may still hold what was deleted: says why, and what to do."""


async def write_anew(settings: RedisSection, *, timeout_s: float) -> list[str]:
    """Have the server write its append-only file, and its snapshot where it makes any, without what was deleted.

    Which of them it has written. StoreFilesError when it refuses or is not done in time; StreamUnavailableError when
    it does not answer.
    """
    client = connect_redis(settings)
    deadline = time.monotonic() + timeout_s
    try:
        with redis_errors("write the store's files anew"):
            written = []
            info = await client.info("persistence")
            if int(info.get("aof_enabled", 0)):
                await _written(client, "BGREWRITEAOF", "aof_rewrite", "aof_last_bgrewrite_status", deadline)
                written.append("append-only file")
            if await _snapshots(client):
                await _written(client, "BGSAVE", "rdb_bgsave", "rdb_last_bgsave_status", deadline)
                written.append("snapshot")
            return written
    except exceptions.ResponseError as error:
        msg = f"the store does not let its files be written anew ({error}): have whoever runs it do that"
        raise StoreFilesError(msg) from error
    finally:
        await client.aclose()


async def _snapshots(client: aioredis.Redis) -> bool:
    save: Any = await client.config_get("save")
    return bool(save.get("save"))


async def _written(client: aioredis.Redis, command: str, working: str, status: str, deadline: float) -> None:
    """One whole writing that began after now: one that was under way before may have read what is deleted."""
    while not await _begun(client, command):
        await _pause(command, deadline)
    while True:
        info = await client.info("persistence")
        if not int(info.get(f"{working}_in_progress", 0)) and not int(info.get(f"{working}_scheduled", 0)):
            break
        await _pause(command, deadline)
    if info.get(status) != "ok":
        msg = f"the store's {command} failed ({status} is {info.get(status)!r}): see its log, make room on its disk"
        raise StoreFilesError(msg)


async def _begun(client: aioredis.Redis, command: str) -> bool:
    try:
        await client.execute_command(command)  # type: ignore[no-untyped-call]  # redis-py's own
    except exceptions.ResponseError as error:
        if "in progress" in str(error):
            return False
        raise
    return True


async def _pause(command: str, deadline: float) -> None:
    if time.monotonic() > deadline:
        msg = f"the store's {command} is not done in time: run the command again, it goes on from there"
        raise StoreFilesError(msg)
    await asyncio.sleep(POLL_S)
