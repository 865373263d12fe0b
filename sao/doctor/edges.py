"""Which connections of docs/architecture.md begin where the command runs, and where each leads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit

from sao.config import RunConfig
from sao.doctor.names import PORT, PROTOCOLS

SERVICES = ("trainer", "ingest", "reward", "weights", "rollout")


class Role(Enum):
    """Who dials."""

    ROLLOUT = "rollout"
    INGEST = "ingest"
    REWARD = "reward"
    TRAINER = "trainer"
    WEIGHTS = "weights"
    PROMETHEUS = "prometheus"


DIALS: Mapping[Role, tuple[str, ...]] = {
    Role.ROLLOUT: ("ingest", "engine", "valkey"),
    Role.WEIGHTS: ("engine", "valkey"),
    Role.INGEST: ("valkey",),
    Role.REWARD: ("valkey",),
    Role.TRAINER: ("valkey",),
    Role.PROMETHEUS: (*SERVICES, "engine"),
}
"""Beside the name server, which every one but Prometheus asks for the names among the addresses, and the collector."""
COLLECTOR = "collector"
"""Takes the spans of every service, where `traces.endpoint` names one."""


def dials(config: RunConfig, role: Role) -> tuple[str, ...]:
    """Whom a role dials under this configuration, name servers aside."""
    traced = bool(config.traces.endpoint) and role is not Role.PROMETHEUS
    return (*DIALS[role], COLLECTOR) if traced else DIALS[role]


@dataclass(frozen=True, slots=True)
class Edge:
    """One target, and all who dial it from here."""

    sources: tuple[str, ...]
    target: str
    address: str
    """host:port of `valkey`, `ingest` and `collector`, host:port/UDP or /TCP of `dns`, a base URL of everything else.

    Empty: the configuration does not say.
    """

    @property
    def name(self) -> str:
        """As it is told."""
        port = self.address.rpartition(":")[2]
        which = {"engine": f" {self.address}", "dns": f" {port}"}.get(self.target, "")
        return f"{', '.join(self.sources)} -> {self.target}{which}"


def edges(config: RunConfig, roles: Iterable[Role], services: Mapping[str, str], engines: Iterable[str]) -> list[Edge]:
    """Each connection of these roles, once for each address.

    `services` tells base URLs by service name, where they are not what the configuration binds; `engines` are base
    URLs, also those that a name server gave.
    """
    asked = list(roles)
    known = bound(config) | dict(services)
    places = {
        "valkey": [host_port(config.redis.url, 6379)],
        "ingest": [config.ingest.target],
        "engine": list(engines) or [""],
        COLLECTOR: [urlsplit(config.traces.endpoint).netloc],
    }
    found: dict[tuple[str, str], list[str]] = {}
    for role in asked:
        for target in dials(config, role):
            telemetry = role is Role.PROMETHEUS and target != "engine"
            for address in [known.get(target, "")] if telemetry else places[target]:
                found.setdefault((target, address), []).append(role.value)
    return [Edge(tuple(sources), target, address) for (target, address), sources in found.items()]


def name_edges(config: RunConfig, roles: Iterable[Role], names: Iterable[str], servers: Iterable[str]) -> list[Edge]:
    """Each way to each name server, of those roles that need one of `names`."""
    wanted = set(names)
    sources = tuple(
        role.value
        for role in roles
        if role is not Role.PROMETHEUS
        and wanted & {host for target in dials(config, role) for host in hosts(config, target)}
    )
    if not sources:
        return []
    return [Edge(sources, "dns", f"{server}:{PORT}/{protocol}") for server in servers for protocol in PROTOCOLS]


def hosts(config: RunConfig, target: str) -> list[str]:
    """The names or addresses under which the configuration knows a target."""
    match target:
        case "valkey":
            found = [config.redis.url]
        case "ingest":
            found = [f"//{config.ingest.target}"]
        case "collector":
            found = [config.traces.endpoint]
        case "engine":
            found = [f"//{config.engine.dns}"] if config.engine.discovery == "dns" else list(config.engine.urls)
        case _:
            found = []
    return [host for url in found if (host := host_of(url))]


def host_of(address: str) -> str:
    """The host of a URL or of host:port."""
    return urlsplit(address if "//" in address else f"//{address}").hostname or ""


def bound(config: RunConfig) -> dict[str, str]:
    """Where each service shows its telemetry on this machine; one whose port is open is left out."""
    ports = {
        "trainer": (config.ingest.bind, config.trainer.metrics_port),
        "ingest": (config.ingest.bind, config.ingest.metrics_port),
        "reward": (config.reward.bind, config.reward.port),
        "weights": (config.weights.bind, config.weights.port),
        "rollout": (config.ingest.bind, config.rollout.metrics_port),
    }
    return {name: f"http://{_reachable(bind)}:{port}" for name, (bind, port) in ports.items() if port}


def host_port(url: str, default: int) -> str:
    """host:port of an address, whatever secrets are in it."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or default}" if parts.hostname else parts.path


def _reachable(bind: str) -> str:
    return "127.0.0.1" if bind in {"0.0.0.0", "::", ""} else bind  # noqa: S104  # compared, not bound
