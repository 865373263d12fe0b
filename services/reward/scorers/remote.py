"""Calls to a scorer over HTTP: bounded in number, in time, in bytes, and repeated only where that may help.

| what happened | then |
|---|---|
| no connection, cut off, 429, 5xx | repeated within the deadline; backoff doubles, with jitter, at least Retry-After |
| 422 | the trajectory can never be scored: UnscorableError |
| any other status, a redirect among them | ScorerFailedError at once |
| the deadline passes while the endpoint works | DeadlinePassedError |
| the deadline would pass before the next repeat | the failure that was to be repeated, at once |
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from sao.config import ConfigError
from sao.tasks.base import UnscorableError
from services.reward import metrics
from services.reward.scorers.base import DeadlinePassedError, ScorerFailedError

MAX_ANSWER_BYTES = 1 << 20
LONGEST_PAUSE_S = 30.0
_HEADER_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAY_PASS = frozenset({429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How one endpoint is called."""

    name: str
    url: str
    token_env: str | None
    deadline_s: float
    concurrency: int
    retries: int
    backoff_s: float


class _MayPassError(ScorerFailedError):
    """A failure that a repeat may cure."""

    def __init__(self, message: str, *, reason: str, not_before_s: float = 0.0) -> None:
        self.reason = reason
        self.not_before_s = not_before_s
        super().__init__(message)


class RemoteCalls:
    """POSTs of JSON to one URL."""

    def __init__(
        self,
        settings: RemoteSettings,
        *,
        environment: Mapping[str, str] = os.environ,
        jitter: Callable[[], float] = random.random,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`jitter` draws from [0, 1). ConfigError when the environment lacks the token's variable."""
        self._settings = settings
        self._jitter = jitter
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            **_authorization(settings, environment),
        }
        self._verify = httpx.create_ssl_context(trust_env=False)
        self._transport = transport
        # One connection each, the last used first: httpcore looks at all connections of a pool for every request.
        self._idle: list[httpx.AsyncClient] = []

    async def post(self, body: Callable[[], object], *, trajectory_id: str) -> Any:  # noqa: ANN401 - any JSON
        """The answer's JSON; `body` is made in a thread, a long text takes its time.

        Raises what the table above says; the deadline begins when it is this call's turn.
        """
        async with self._slots:
            ends_s = time.monotonic() + self._settings.deadline_s
            limit = asyncio.timeout(self._settings.deadline_s)
            client = self._idle.pop() if self._idle else self._new_client()
            try:
                async with limit:
                    content = await asyncio.to_thread(lambda: json.dumps(body(), ensure_ascii=False).encode())
                    return await self._patiently(client, content, trajectory_id, ends_s)
            except TimeoutError as error:
                if limit.expired():
                    msg = f"{self._settings.name} is still running after {self._settings.deadline_s:g} s"
                    raise DeadlinePassedError(msg) from error
                raise
            finally:
                self._idle.append(client)

    async def close(self) -> None:
        """Close the connections."""
        while self._idle:
            await self._idle.pop().aclose()

    def _new_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers=self._headers,
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1),
            timeout=httpx.Timeout(self._settings.deadline_s * 2),  # never the first to end: the call's deadline rules
            transport=self._transport,
            verify=self._verify,
            trust_env=False,
        )

    async def _patiently(self, client: httpx.AsyncClient, content: bytes, trajectory_id: str, ends_s: float) -> Any:  # noqa: ANN401
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._once(client, content, trajectory_id)
            except _MayPassError as error:
                pause_s = max(self._backoff_s(attempt), error.not_before_s)
                if attempt > self._settings.retries or time.monotonic() + pause_s >= ends_s:
                    tries = f" (try {attempt}, the last)" if attempt > 1 else ""
                    msg = f"{error}{tries}"
                    raise ScorerFailedError(msg) from error
                metrics.SCORER_RETRIES.labels(self._settings.name, error.reason).inc()
                await asyncio.sleep(pause_s)

    def _backoff_s(self, attempt: int) -> float:
        longest = min(self._settings.backoff_s * 2.0 ** (attempt - 1), LONGEST_PAUSE_S)
        return longest * (0.5 + 0.5 * self._jitter())

    async def _once(self, client: httpx.AsyncClient, content: bytes, trajectory_id: str) -> Any:  # noqa: ANN401
        url = self._settings.url.partition("?")[0]  # in logs and letters: a query may hold a secret
        headers = {"Content-Type": "application/json"}
        if _HEADER_SAFE.fullmatch(trajectory_id):
            headers["X-Request-Id"] = trajectory_id
        try:
            async with client.stream("POST", self._settings.url, content=content, headers=headers) as response:
                body = await _bounded(response, url)
        except httpx.TransportError as error:
            msg = f"{url}: {type(error).__name__}: {error}"
            raise _MayPassError(msg, reason="connection") from error
        return _json_of(response, body, url)


def _authorization(settings: RemoteSettings, environment: Mapping[str, str]) -> dict[str, str]:
    if settings.token_env is None:
        return {}
    token = environment.get(settings.token_env, "")
    if not (token and token.isascii() and token.isprintable()):
        reason = f"the environment has no usable token in {settings.token_env}; set it where the reward service starts"
        raise ConfigError(key=f"reward.scorers.{settings.name}.token_env", message=reason)
    return {"Authorization": f"Bearer {token}"}


async def _bounded(response: httpx.Response, url: str) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_raw():  # as it came: a small compressed answer may hold gigabytes
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            msg = f"{url} answers with more than {MAX_ANSWER_BYTES} bytes"
            raise ScorerFailedError(msg)
    return bytes(body)


def _json_of(response: httpx.Response, body: bytes, url: str) -> Any:  # noqa: ANN401
    said = body[:200].decode("utf-8", "replace")
    if response.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
        msg = f"{url} answers 422: {said}"
        raise UnscorableError(msg)
    if response.status_code in _MAY_PASS:
        msg = f"{url} answers {response.status_code}: {said}"
        not_before_s = _retry_after_s(response.headers.get("retry-after"), time.time())
        raise _MayPassError(msg, reason=str(response.status_code), not_before_s=not_before_s)
    if not response.is_success:
        msg = f"{url} answers {response.status_code}: {said}"
        raise ScorerFailedError(msg)
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        msg = f"{url} answers in Content-Encoding {encoding[:50]!r}, it was asked for identity"
        raise ScorerFailedError(msg)
    try:
        return parsed(body)
    except (ValueError, RecursionError) as error:
        msg = f"{url} answers what is no JSON ({error}): {said!r}"
        raise ScorerFailedError(msg) from error


def parsed(text: str | bytes) -> Any:  # noqa: ANN401 - any JSON
    """As json.loads, but ValueError where an object has a key twice: nobody knows which of the two was meant."""
    return json.loads(text, object_pairs_hook=_unambiguous)


def _unambiguous(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        msg = "an object has a key twice"
        raise ValueError(msg)
    return found


def _retry_after_s(header: str | None, now_s: float) -> float:
    """Seconds from now, of a number or a date; 0 without the header or when it cannot be read."""
    if header is None:
        return 0.0
    text = header.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(parsedate_to_datetime(text).timestamp() - now_s, 0.0)
    except (ValueError, OverflowError):
        return 0.0
