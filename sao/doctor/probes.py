"""Ask everything at once, each question with a deadline of its own; what comes back says nothing about good or bad.

Nothing is changed anywhere: PING and INFO, GET, and a renewal of no lease.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import shutil
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
from pydantic import SecretStr
from redis import exceptions

from sao.config import RunConfig
from sao.doctor.checks import Clock, Disk, EngineSeen, HealthSeen, Observations, Reached, TokenTried
from sao.doctor.edges import Edge, Role, bound, edges
from sao.redis_client import connect_redis
from sao.v1 import archive_pb2, ingest_pb2, ingest_pb2_grpc, trajectory_pb2

_REFUSED = frozenset({httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN})
_LAG = re.compile(r'^sao_trainer_lag_updates\{statistic="max"\} (\S+)$', re.MULTILINE)
_GUARDED = {"reward": "/v1/preferences", "weights": "/v1/weights"}
"""A path of each service that wants the token."""


async def observe(
    config: RunConfig, roles: Sequence[Role], services: Mapping[str, str], *, timeout_s: float
) -> Observations:
    """Everything that can be seen from here within about twice `timeout_s`."""
    seen = Observations(packages=installed_packages(), protocol=protocol_digest())
    seen.disks += [room("run folder", config.run.dir), room("version store", config.versions_dir)]
    urls, problem = await _engine_urls(config, timeout_s)
    asked = edges(config, roles, services, urls)
    if problem:
        seen.edges.append(Reached(Edge(("here",), "dns", config.engine.dns), problem))
    probes: list[tuple[str, Callable[[], Awaitable[None]]]] = []
    async with httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client:
        for one in asked:
            if not one.address:
                seen.edges.append(Reached(one))
                continue
            probe = _probe_of(one, client)
            probes.append((f"edge {one.name}", partial(probe, config, one, seen)))
        told = bound(config) | dict(services)
        dialled = {one.target for one in asked if one.address.startswith("http")}
        for name, url in told.items():
            if name in services and name not in dialled:
                probes.append((f"health {name}", partial(_health, client, config, name, url, seen)))
        await asyncio.gather(*(_bounded(name, probe, seen, 2 * timeout_s) for name, probe in probes))
    return seen


_Probe = Callable[[RunConfig, Edge, Observations], Awaitable[None]]


def _probe_of(edge: Edge, client: httpx.AsyncClient) -> _Probe:
    match edge.target:
        case "valkey":
            return _store
        case "engine":
            return partial(_engine, client)
        case "ingest" if not edge.address.startswith("http"):
            return _ingest
        case _:
            return partial(_service, client)


async def _bounded(name: str, probe: Callable[[], Awaitable[None]], seen: Observations, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await probe()
    except TimeoutError:
        seen.failed.append((name, f"no answer within {limit_s:g} s"))
    except Exception as error:  # noqa: BLE001 - the edge of one probe; the others must still be told
        seen.failed.append((name, type(error).__name__))


async def _engine_urls(config: RunConfig, timeout_s: float) -> tuple[list[str], str]:
    if config.engine.discovery == "static":
        return list(config.engine.urls), ""
    name, _, port = config.engine.dns.partition(":")
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            rows = await loop.getaddrinfo(name, int(port), family=socket.AF_INET, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        return [], f"{name} cannot be resolved ({error or 'no answer in time'})"
    return sorted({f"http://{row[4][0]!s}:{port}" for row in rows}), ""


async def _store(config: RunConfig, edge: Edge, seen: Observations) -> None:
    client = connect_redis(config.redis, retries=0)
    try:
        before = time.time()
        seconds, micros = await client.time()
        after = time.time()
        info = await client.info("everything")
    except exceptions.AuthenticationError as error:
        seen.edges.append(Reached(edge))
        seen.tokens.append(TokenTried("store", "password in redis.url", accepted=False, found=str(error)))
        return
    except (exceptions.RedisError, OSError) as error:
        seen.edges.append(Reached(edge, _words(error)))
        return
    finally:
        await client.aclose()
    seen.edges.append(Reached(edge))
    seen.store = info
    seen.clocks.append(Clock("store", seconds + micros / 1e6 - (before + after) / 2, (after - before) / 2))


async def _ingest(config: RunConfig, edge: Edge, seen: Observations) -> None:
    async with grpc.aio.insecure_channel(edge.address) as channel:
        token = config.auth.token
        sent = (("authorization", f"Bearer {token.get_secret_value()}"),) if token is not None else ()
        request = ingest_pb2.RenewLeasesRequest(worker_id="sao-doctor")
        limit_s = config.redis.timeout_s * 0.9
        try:
            async with asyncio.timeout(limit_s):
                await channel.channel_ready()
        except TimeoutError:
            seen.edges.append(Reached(edge, f"no connection within {limit_s:g} s"))
            return
        seen.edges.append(Reached(edge))
        try:
            stub: Any = ingest_pb2_grpc.TrajectoryIngestServiceStub(channel)
            await stub.RenewLeases(request, timeout=limit_s, metadata=sent)
        except grpc.aio.AioRpcError as error:
            refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
            told = "refused" if refused else f"not refused ({error.code().name})"
            seen.tokens.append(TokenTried("ingest", "auth.token", accepted=not refused, found=told))
            return
        seen.tokens.append(TokenTried("ingest", "auth.token", accepted=True, found="accepted"))


async def _engine(client: httpx.AsyncClient, config: RunConfig, edge: Edge, seen: Observations) -> None:
    before = time.time()
    response = await _get(client, f"{edge.address.rstrip('/')}/server_info", config.engine.api_key, edge, seen)
    if response is None:
        return
    _note_clock(response, f"engine {edge.address}", before, seen)
    refused = response.status_code in _REFUSED
    told = f"answered {response.status_code}"
    seen.tokens.append(TokenTried(f"engine {edge.address}", "engine.api_key", accepted=not refused, found=told))
    if not refused:
        try:
            body = response.json()
        except ValueError:
            body = {}
        seen.engines.append(EngineSeen(edge.address, body if isinstance(body, dict) else {}))


async def _service(client: httpx.AsyncClient, config: RunConfig, edge: Edge, seen: Observations) -> None:
    before = time.time()
    response = await _get(client, f"{edge.address.rstrip('/')}/healthz", None, edge, seen)
    if response is None:
        return
    _note_clock(response, edge.target, before, seen)
    alive = response.status_code == httpx.codes.OK
    told = response.text.strip()[:300] or f"answered {response.status_code}"
    seen.health.append(HealthSeen(edge.target, alive, told))
    try:
        await _more(client, config, edge, seen)
    except httpx.HTTPError as error:
        seen.failed.append((f"{edge.target} {edge.address}", _words(error)))


async def _health(client: httpx.AsyncClient, config: RunConfig, name: str, url: str, seen: Observations) -> None:
    """A service that somebody named, and no edge leads to."""
    await _service(client, config, Edge(("here",), name, url), seen)


async def _more(client: httpx.AsyncClient, config: RunConfig, edge: Edge, seen: Observations) -> None:
    """What only some services have: the trainer's lag, and doors with a token."""
    url = edge.address.rstrip("/")
    if edge.target == "trainer" and (found := _LAG.search((await client.get(f"{url}/metrics")).text)):
        value = float(found[1])
        seen.lag = None if math.isnan(value) else value  # NaN before the first update
    if path := _GUARDED.get(edge.target):
        answer = await client.get(f"{url}{path}", headers=_bearer(config.auth.token))
        refused = answer.status_code in _REFUSED
        told = f"answered {answer.status_code}"
        seen.tokens.append(TokenTried(edge.target, "auth.token", accepted=not refused, found=told))


async def _get(
    client: httpx.AsyncClient, url: str, key: SecretStr | None, edge: Edge, seen: Observations
) -> httpx.Response | None:
    try:
        response = await client.get(url, headers=_bearer(key))
    except httpx.HTTPError as error:
        seen.edges.append(Reached(edge, _words(error)))
        return None
    seen.edges.append(Reached(edge))
    return response


def _bearer(secret: SecretStr | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret.get_secret_value()}"} if secret is not None else {}


def _note_clock(response: httpx.Response, whose: str, before: float, seen: Observations) -> None:
    """The Date header has whole seconds, cut off."""
    try:
        said = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return
    after = time.time()
    seen.clocks.append(Clock(whose, said + 0.5 - (before + after) / 2, 0.5 + (after - before) / 2))


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def room(what: str, path: Path) -> Disk:
    """How much is free where this folder lies."""
    if not path.is_dir():
        return Disk(what, str(path), None)
    usage = shutil.disk_usage(path)
    return Disk(what, str(path), usage.free, usage.total)


def installed_packages() -> dict[str, tuple[str, str | None]]:
    """What `sao` itself needs, and Python: oldest version that will do, installed version."""
    found: dict[str, tuple[str, str | None]] = {"python": ("3.11", ".".join(map(str, sys.version_info[:3])))}
    for requirement in _requirements():
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)", requirement)
        if match:
            try:
                found[match[1]] = (match[2], metadata.version(match[1]))
            except metadata.PackageNotFoundError:
                found[match[1]] = (match[2], None)
    return found


def _requirements() -> Iterable[str]:
    try:
        return metadata.requires("sao") or []
    except metadata.PackageNotFoundError:
        return []  # run from a checkout that nobody has installed


def protocol_digest() -> str:
    """Twelve digits that are the same wherever sao.v1 is."""
    files = (trajectory_pb2.DESCRIPTOR, ingest_pb2.DESCRIPTOR, archive_pb2.DESCRIPTOR)
    return hashlib.sha256(b"".join(file.serialized_pb for file in files)).hexdigest()[:12]
