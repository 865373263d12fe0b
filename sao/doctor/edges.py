"""Which connections of docs/architecture.md begin where the command runs, and where each leads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit

from sao.config import RunConfig

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
"""Beside the name server, which every one asks for the names among the addresses."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One target, and all who dial it from here."""

    sources: tuple[str, ...]
    target: str
    address: str
    """host:port of `valkey` and `ingest`, a base URL of everything else; empty: the configuration does not say."""

    @property
    def name(self) -> str:
        """As it is told."""
        which = f" {self.address}" if self.target == "engine" else ""
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
    }
    found: dict[tuple[str, str], list[str]] = {}
    for role in asked:
        for target in DIALS[role]:
            telemetry = role is Role.PROMETHEUS and target != "engine"
            for address in [known.get(target, "")] if telemetry else places[target]:
                found.setdefault((target, address), []).append(role.value)
    return [Edge(tuple(sources), target, address) for (target, address), sources in found.items()]


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
