"""Ask everything at once, each question with a deadline of its own; what comes back says nothing about good or bad.

Nothing is changed anywhere: PING and INFO, GET, and a renewal of no lease.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import shutil
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
from sao.doctor.edges import Edge, Role, bound, dials, edges, host_of, hosts, name_edges
from sao.doctor.names import HOSTS, RESOLV_CONF, ask, asked_of_a_server, look_up, read, resolver
from sao.redis_client import connect_redis
from sao.v1 import archive_pb2, ingest_pb2, ingest_pb2_grpc, trajectory_pb2

_REFUSED = frozenset({httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN})
_LAG = re.compile(r'^sao_trainer_lag_updates\{statistic="max"\} (\S+)$', re.MULTILINE)
_GUARDED = {"reward": "/v1/preferences", "weights": "/v1/weights"}
"""A path of each service that wants the token."""


async def observe(
    config: RunConfig, roles: Sequence[Role], services: Mapping[str, str], *, timeout_s: float
) -> Observations:
    """Everything that can be seen from here within about three times `timeout_s`."""
    seen = Observations(packages=installed_packages(), protocol=protocol_digest())
    seen.disks += [room("run folder", config.run.dir), room("version store", config.versions_dir)]
    await _names(config, roles, services, seen, timeout_s)
    unresolved = {one.name for one in seen.names if one.problem}
    asked = edges(config, roles, services, _engine_urls(config, seen))
    probes: list[tuple[str, Callable[[], Awaitable[None]]]] = []
    async with httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client:
        for one in asked:
            if not one.address or host_of(one.address) in unresolved:
                seen.edges.append(Reached(one, unresolved=host_of(one.address)))
                continue
            probe = _probe_of(one, client)
            probes.append((f"edge {one.name}", partial(probe, config, one, seen)))
        told = bound(config) | dict(services)
        dialled = {one.target for one in asked if one.address.startswith("http")}
        for name, url in told.items():
            if name in services and name not in dialled and host_of(url) not in unresolved:
                probes.append((f"health {name}", partial(_health, client, config, name, url, seen)))
        await asyncio.gather(*(_bounded(name, probe, seen, 2 * timeout_s) for name, probe in probes))
    return seen


async def _names(
    config: RunConfig, roles: Sequence[Role], services: Mapping[str, str], seen: Observations, timeout_s: float
) -> None:
    """Ask for every name that these roles dial, and the name servers themselves."""
    wanted = [host for role in roles for target in dials(config, role) for host in hosts(config, target)]
    names = asked_of_a_server([*wanted, *map(host_of, services.values())], read(HOSTS))
    system = resolver(read(RESOLV_CONF))
    ways = name_edges(config, roles, names, system.servers)
    problems = [
        ask(way.address.rpartition(":")[0], way.address[-3:], system.first(names[0]), timeout_s=timeout_s)
        for way in ways
    ]
    resolved, found = await asyncio.gather(look_up(names, timeout_s=timeout_s), asyncio.gather(*problems))
    seen.names += resolved
    seen.edges += map(Reached, ways, found)


def _engine_urls(config: RunConfig, seen: Observations) -> list[str]:
    """One for each address of engine.dns; that name itself where it has none, or needs no name server."""
    if config.engine.discovery == "static":
        return list(config.engine.urls)
    name, port = host_of(config.engine.dns), config.engine.dns.rpartition(":")[2]
    addresses = [address for one in seen.names if one.name == name for address in one.addresses]
    shown = [f"[{address}]" if ":" in address else address for address in addresses]
    return [f"http://{address}:{port}" for address in shown] or [f"http://{config.engine.dns}"]


_Probe = Callable[[RunConfig, Edge, Observations], Awaitable[None]]


def _probe_of(edge: Edge, client: httpx.AsyncClient) -> _Probe:
    match edge.target:
        case "valkey":
            return _store
        case "engine":
            return partial(_engine, client)
        case "ingest" if not edge.address.startswith("http"):
            return _ingest
        case "collector":
            return _collector
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


async def _collector(config: RunConfig, edge: Edge, seen: Observations) -> None:
    """The connection alone: an empty export would be an answer too, and counted as one."""
    host, _, port = edge.address.rpartition(":")
    limit_s = config.redis.timeout_s * 0.9
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(host, int(port))
    except TimeoutError:
        seen.edges.append(Reached(edge, f"no connection within {limit_s:g} s"))
        return
    except OSError as error:
        seen.edges.append(Reached(edge, _words(error)))
        return
    writer.close()
    seen.edges.append(Reached(edge))


async def _engine(client: httpx.AsyncClient, config: RunConfig, edge: Edge, seen: Observations) -> None:
    """The edge by /model_info, which is answered at once whatever the engine does; the rest by /server_info."""
    url, key = edge.address.rstrip("/"), config.engine.api_key
    before = time.time()
    response = await _get(client, f"{url}/model_info", key, edge, seen)
    if response is None:
        return
    if isinstance(response, str):
        seen.engines.append(EngineSeen(edge.address, {}, silent=f"/model_info: {response}", hangs=True))
        return
    _note_clock(response, f"engine {edge.address}", before, seen)
    refused = response.status_code in _REFUSED
    told = f"answered {response.status_code}"
    seen.tokens.append(TokenTried(f"engine {edge.address}", "engine.api_key", accepted=not refused, found=told))
    if refused:
        return
    try:
        body = (await client.get(f"{url}/server_info", headers=_bearer(key))).json()
    except httpx.HTTPError as error:
        seen.engines.append(EngineSeen(edge.address, {}, silent=f"/server_info: {_words(error)}"))
        return
    except ValueError:
        body = {}
    seen.engines.append(EngineSeen(edge.address, body if isinstance(body, dict) else {}))


async def _service(client: httpx.AsyncClient, config: RunConfig, edge: Edge, seen: Observations) -> None:
    before = time.time()
    response = await _get(client, f"{edge.address.rstrip('/')}/healthz", None, edge, seen)
    if response is None:
        return
    if isinstance(response, str):
        seen.health.append(HealthSeen(edge.target, alive=False, sentence=response))
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
    if config.auth.token is not None and (path := _GUARDED.get(edge.target)):
        answer = await client.get(f"{url}{path}", headers=_bearer(config.auth.token))
        refused = answer.status_code in _REFUSED
        told = f"answered {answer.status_code}"
        seen.tokens.append(TokenTried(edge.target, "auth.token", accepted=not refused, found=told))


async def _get(
    client: httpx.AsyncClient, url: str, key: SecretStr | None, edge: Edge, seen: Observations
) -> httpx.Response | str | None:
    """The answer; why there is none of a process that was reached, or nothing where the edge itself fails."""
    try:
        response = await client.get(url, headers=_bearer(key))
    except (httpx.ReadTimeout, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
        seen.edges.append(Reached(edge))
        return f"it was reached, and gave no answer: {_words(error)}"
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
    match error:
        case httpx.ConnectTimeout():
            return "no connection in time"
        case httpx.ReadTimeout():
            return "nothing came in time"
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
