"""How every service reaches Redis: limited retries, deadlines, key names, and errors in the words of the streams.

All keys of a run carry the hash tag `{run}`, so that one Lua script may touch them in a cluster. Commands are
those that Redis >= 7 and Valkey share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from redis import asyncio as aioredis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from sao.config.schema import RedisSection
from sao.streams.base import StreamFullError, StreamName, StreamUnavailableError, routed_experts_key

# What a server says while it cannot serve: starting, read-only replica, disk full, no quorum.
_UNAVAILABLE_REPLIES = (
    "LOADING",
    "READONLY",
    "MISCONF",
    "NOREPLICAS",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "NOEPOCH",  # sao/streams/lua/append.lua
    "BUSY ",
)

Arg = str | bytes | int

MAX_CONNECTIONS = 1024
"""Per client. redis-py's own bound of 100 fails calls at once where ingest takes 512 of them at a time."""


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Names of all keys of one run."""

    run: str

    def key(self, what: str) -> str:
        return f"sao:{{{self.run}}}:{what}"

    def stream(self, name: StreamName) -> str:
        return self.key(f"stream:{name.value}")

    def payload(self, trajectory_id: str) -> str:
        return self.key(f"payload:{trajectory_id}")

    def routed_experts(self, trajectory_id: str) -> str:
        return self.key(routed_experts_key(trajectory_id))

    def seen(self, hour: int) -> str:
        """Ids whose UUIDv7 time lies in this hour since 1970."""
        return self.key(f"seen:{hour}")

    @property
    def dead(self) -> str:
        return self.key("dead")

    @property
    def dead_totals(self) -> str:
        """`bytes` of all dead letters, and `event:kind` -> count of what became of them."""
        return self.key("dead-totals")

    @property
    def unconsumed(self) -> str:
        return self.key("unconsumed")

    @property
    def waiting(self) -> str:
        """Id -> fields of what waits for feedback (sao.streams.room)."""
        return self.key("waiting")

    @property
    def waiting_since(self) -> str:
        """The same ids, scored by the Unix millisecond at which each was parked."""
        return self.key("waiting-since")

    @property
    def answers(self) -> str:
        """Id -> feedback: its value, a line feed, JSON."""
        return self.key("answers")

    @property
    def answers_kept(self) -> str:
        """Ids whose answer is not joined, scored by the millisecond at which it came."""
        return self.key("answers-kept")

    @property
    def answers_ready(self) -> str:
        """Those of them that wait."""
        return self.key("answers-ready")

    @property
    def answers_joined(self) -> str:
        """Ids whose answer is joined, scored by the millisecond of that."""
        return self.key("answers-joined")

    @property
    def answers_expired(self) -> str:
        """Ids that nobody answered in time, scored by the millisecond of their burial."""
        return self.key("answers-expired")

    @property
    def cursor(self) -> str:
        """The next slot that was never leased (sao.streams.dispatch says what a slot is)."""
        return self.key("cursor")

    @property
    def frontier(self) -> str:
        return self.key("frontier")

    @property
    def winners(self) -> str:
        return self.key("winners")

    @property
    def leases(self) -> str:
        """Slot -> attempt:deadline_ms:worker."""
        return self.key("leases")

    @property
    def lease_expiry(self) -> str:
        """The same slots, scored by the Unix millisecond at which the lease runs out."""
        return self.key("lease-expiry")

    @property
    def board(self) -> str:
        """Fields `epoch`, `trainer`, `preference` (the current version), `preference-*` (change_preferences.lua)."""
        return self.key("board")

    @property
    def versions(self) -> str:
        return self.key("board:versions")

    @property
    def engines(self) -> str:
        return self.key("board:engines")

    @property
    def preferences(self) -> str:
        return self.key("board:preferences")

    @property
    def preference_changes(self) -> str:
        """Number -> record."""
        return self.key("board:preference-changes")

    @property
    def preference_schedule(self) -> str:
        """Number of the record that scheduled it -> that record, a line break, what every record of it ends with."""
        return self.key("board:preference-schedule")

    @property
    def preference_requests(self) -> str:
        """Ids of the requests that made the newest records, scored by the records' numbers."""
        return self.key("board:preference-requests")


def connect_redis(config: RedisSection, *, retries: int = 2) -> aioredis.Redis:
    """A client whose every command ends within about (retries + 1) x timeout_s; it connects at the first one.

    Give `retries=0` for commands whose answer changes when they are sent twice.
    """
    return aioredis.Redis.from_url(
        config.url,
        protocol=2,
        decode_responses=False,
        socket_timeout=config.timeout_s,
        socket_connect_timeout=config.timeout_s,
        socket_keepalive=True,
        max_connections=MAX_CONNECTIONS,
        health_check_interval=0,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), retries),
    )


@contextlib.contextmanager
def redis_errors(what: str) -> Iterator[None]:
    """Raise what Redis answers as StreamFullError or StreamUnavailableError, naming the operation `what`."""
    try:
        yield
    except exceptions.OutOfMemoryError as error:
        msg = f"{what}: the store is at its memory bound, nothing was written; retry after something was settled"
        raise StreamFullError(msg) from error
    except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
        msg = f"{what}: the store did not answer ({type(error).__name__}: {error}); retry with a limit"
        raise StreamUnavailableError(msg) from error
    except exceptions.ResponseError as error:
        if isinstance(error, exceptions.ReadOnlyError) or str(error).startswith(_UNAVAILABLE_REPLIES):
            msg = f"{what}: the store cannot serve now ({error}); retry with a limit"
            raise StreamUnavailableError(msg) from error
        raise


class Scripts:
    """The Lua files of one package, each loaded once and run atomically."""

    def __init__(self, client: aioredis.Redis, package: str) -> None:
        self._client = client
        self._package = package
        self._loaded: dict[str, Any] = {}

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:  # noqa: ANN401
        """The reply of NAME.lua, in RESP2 types (bytes, int, list, None); redis.exceptions as redis-py raises them."""
        if name not in self._loaded:
            text = resources.files(self._package).joinpath(f"{name}.lua").read_text(encoding="utf-8")
            self._loaded[name] = self._client.register_script(text)
        return await self._loaded[name](keys=list(keys), args=list(args))
