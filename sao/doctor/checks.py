"""What was observed, judged: pure functions from observations to checks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from sao.config import RunConfig
from sao.doctor.edges import Edge
from sao.doctor.names import Resolved

CLOCK_WARN_S, CLOCK_FAIL_S = 2.0, 10.0
"""Differences of a clock to this one, beyond what the measurement can tell."""
DISK_WARN = 0.8
TESTED_ENGINE, OLDEST_ENGINE = "0.5.23", "0.5.21"
OLDEST_STORE = (7, 0)


class Status(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the answer."""

    name: str
    status: Status
    found: str
    expected: str = ""
    do: str = ""


@dataclass(frozen=True, slots=True)
class Reached:
    """One edge was tried."""

    edge: Edge
    problem: str = ""
    """Why nothing answers; empty: it does."""
    unresolved: str = ""
    """The name in its address that leads nowhere, so it could not be tried."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Another clock."""

    whose: str
    ahead_s: float
    unsure_s: float
    """How far off the measurement itself may be."""


@dataclass(frozen=True, slots=True)
class TokenTried:
    """A secret was offered."""

    whose: str
    key: str
    """The setting that holds it."""
    accepted: bool
    found: str


@dataclass(frozen=True, slots=True)
class Disk:
    what: str
    path: str
    free: int | None
    """Bytes; None: the folder is not on this machine."""
    total: int = 1


@dataclass(frozen=True, slots=True)
class EngineSeen:
    url: str
    info: Mapping[str, object]
    """Of /server_info; empty: it did not say."""
    silent: str = ""
    """Why it did not, though it was reached."""
    hangs: bool = False
    """It answers not even what is answered whatever an engine does."""


@dataclass(frozen=True, slots=True)
class HealthSeen:
    service: str
    alive: bool
    sentence: str


@dataclass
class Observations:
    """Everything that the probes have brought; what they could not ask is missing."""

    edges: list[Reached] = field(default_factory=list)
    names: list[Resolved] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    tokens: list[TokenTried] = field(default_factory=list)
    disks: list[Disk] = field(default_factory=list)
    engines: list[EngineSeen] = field(default_factory=list)
    health: list[HealthSeen] = field(default_factory=list)
    store: Mapping[str, object] = field(default_factory=dict)
    """Of the store's INFO; empty: it did not answer."""
    packages: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    """Name -> oldest version that will do, installed version (None: not there)."""
    protocol: str = ""
    """Digest of sao.v1 as it is installed here."""
    lag: float | None = None
    """Of the trainer's newest update, in updates."""
    failed: list[tuple[str, str]] = field(default_factory=list)
    """Probes that broke in a way nobody has foreseen, and how."""


def judge(config: RunConfig, seen: Observations) -> list[Check]:
    """Every check that the observations allow, in the order to read them in."""
    return [
        *map(edge, seen.edges),
        *names(seen),
        *map(token, seen.tokens),
        *store(config, seen.store),
        *engines(config, seen.engines),
        *map(health, seen.health),
        *lag(config, seen.lag),
        *map(clock, seen.clocks),
        *(disk(one, config.checkpoint.free_space_mb * 2**20) for one in seen.disks),
        *packages(seen.packages),
        *protocol(seen.protocol),
        *(Check(name, Status.FAIL, found, "an answer", "report this") for name, found in seen.failed),
    ]


def edge(reached: Reached) -> Check:
    """Does the connection stand?"""
    to, name = reached.edge, f"edge {reached.edge.name}"
    if not to.address:
        setting = {"ingest": "ingest.target", "engine": "engine.urls or engine.dns"}.get(to.target, "")
        do = f"set {setting}" if setting else f"give --service {to.target}=URL"
        return Check(name, Status.WARN, "not tried: no address is known", "an address", do)
    if reached.unresolved:
        found = f"{to.address}: not tried, {reached.unresolved} leads to no address"
        return Check(name, Status.WARN, found, "an address", "mend the name, or the way to the name server, first")
    if reached.problem and to.target == "dns":
        return Check(name, Status.FAIL, f"{to.address}: {reached.problem}", "an answer", _NAME_SERVER[to.address[-3:]])
    if reached.problem:
        do = f"is {to.target} up, its name right, and does a NetworkPolicy or firewall let this edge through"
        return Check(name, Status.FAIL, f"{to.address}: {reached.problem}", "an answer", do)
    return Check(name, Status.OK, f"{to.address} answers")


_LET_THROUGH = "is the name server up, and does a NetworkPolicy or firewall let this edge through"
_NAME_SERVER = {
    "UDP": f"{_LET_THROUGH}; no name is found without it",
    "TCP": f"{_LET_THROUGH}; an answer too long for UDP, as of a name with many engines, comes over TCP only",
}


def names(seen: Observations) -> Iterator[Check]:
    """What do the names in the configuration lead to? Not told while no name server answers: that is told already."""
    over_udp = [one for one in seen.edges if one.edge.target == "dns" and one.edge.address.endswith("UDP")]
    unreachable = bool(over_udp) and all(one.problem for one in over_udp)
    for one in seen.names:
        name = f"name {one.name}"
        if not one.problem:
            yield Check(name, Status.OK, ", ".join(one.addresses))
        elif not unreachable:
            do = "is there a Service of that name in this namespace, and is the name in the run file the right one"
            yield Check(name, Status.FAIL, one.problem, "an address", do)


def token(tried: TokenTried) -> Check:
    """Is the secret that the configuration holds the one that the other side expects?"""
    name = f"token {tried.whose}"
    if tried.accepted:
        return Check(name, Status.OK, tried.found)
    do = f"give both sides the same {tried.key}, and restart the one that was changed"
    return Check(name, Status.FAIL, tried.found, f"{tried.key} accepted", do)


def store(config: RunConfig, info: Mapping[str, object]) -> Iterator[Check]:
    """Is the store one that loses nothing and refuses in time?"""
    if not info:
        return
    version = str(info.get("valkey_version") or info.get("redis_version") or "")
    redis_version = _numbers(str(info.get("redis_version", "")))
    if redis_version[:2] < OLDEST_STORE:
        yield Check("store version", Status.FAIL, version or "unknown", "Redis >= 7 or Valkey", "upgrade the store")
    else:
        yield Check("store version", Status.OK, version)
    yield _persistence(info)
    policy = str(info.get("maxmemory_policy", "unknown"))
    if policy == "noeviction":
        yield Check("store eviction", Status.OK, policy)
    else:
        do = "set maxmemory-policy noeviction: this one throws trajectories away when the store fills up"
        yield Check("store eviction", Status.FAIL, policy, "noeviction", do)
    yield _memory(config, info)


def _persistence(info: Mapping[str, object]) -> Check:
    name = "store persistence"
    if not int(str(info.get("aof_enabled", 0))):
        do = "set appendonly yes: without it a restart of the store loses every trajectory that waits"
        return Check(name, Status.FAIL, "no append-only file", "appendonly yes", do)
    for key in ("aof_last_write_status", "aof_last_bgrewrite_status"):
        if (found := str(info.get(key, "ok"))) != "ok":
            return Check(name, Status.FAIL, f"{key} {found}", "ok", "make room on the store's disk, see its log")
    return Check(name, Status.OK, "append-only file")


def _memory(config: RunConfig, info: Mapping[str, object]) -> Check:
    name, bound = "store memory", int(str(info.get("maxmemory", 0)))
    if bound == 0:
        do = "set maxmemory below what the store's machine has: back-pressure is a share of it"
        return Check(name, Status.FAIL, "no bound", "maxmemory set", do)
    used, mark = int(str(info.get("used_memory", 0))) / bound, config.redis.back_pressure_at
    found, expected = f"{used:.0%} of {bound >> 20} MiB", f"below {mark:.0%} (redis.back_pressure_at)"
    do = "see what fills it: docs/store-memory.md"
    if used >= 1:
        return Check(name, Status.FAIL, found, expected, do)
    return Check(name, Status.WARN, found, expected, do) if used >= mark else Check(name, Status.OK, found)


def engines(config: RunConfig, seen: Sequence[EngineSeen]) -> Iterator[Check]:
    """Is every engine a release that is known, started as docs/engine.md demands, and none like another?"""
    for one in seen:
        yield _silent(one) if one.silent else _release(one)
        if one.info:
            yield _flags(config, one)
    seeds = Counter(str(one.info["random_seed"]) for one in seen if "random_seed" in one.info)
    if shared := [seed for seed, count in seeds.items() if count > 1]:
        alike = [one.url for one in seen if str(one.info.get("random_seed")) in shared]
        do = "give each engine its own --random-seed, or none: they sample the same texts"
        yield Check("engine seeds", Status.FAIL, f"one seed for {', '.join(alike)}", "a seed of its own each", do)


def _silent(one: EngineSeen) -> Check:
    name, do = f"engine release {one.url}", "ask again, or give it more time with --timeout"
    if one.hangs:
        return Check(name, Status.FAIL, one.silent, "an answer", f"{do}; see its log, and restart it if it hangs")
    return Check(name, Status.WARN, one.silent, "its release and flags", f"it may be loading weights: {do}")


def _release(one: EngineSeen) -> Check:
    name, found = f"engine release {one.url}", str(one.info.get("version", ""))
    expected = f"SGLang {TESTED_ENGINE}"
    if not (numbers := _numbers(found)) or numbers < _numbers(OLDEST_ENGINE):
        return Check(name, Status.FAIL, found or "it does not say", expected, f"install sglang=={TESTED_ENGINE} there")
    if found != TESTED_ENGINE:
        return Check(name, Status.WARN, found, expected, "run `make prove-weights` against this release first")
    return Check(name, Status.OK, found)


def _flags(config: RunConfig, one: EngineSeen) -> Check:
    wrong = [*_wrong_flags(config, one.info)]
    name = f"engine flags {one.url}"
    if not wrong:
        return Check(name, Status.OK, "as docs/engine.md says")
    return Check(name, Status.FAIL, "; ".join(found for found, _ in wrong), "as docs/engine.md says", _start(wrong))


def _start(wrong: Iterable[tuple[str, str]]) -> str:
    return f"start it with {' '.join(flag for _, flag in wrong)}"


def _wrong_flags(config: RunConfig, info: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    if info.get("enable_cache_report") is not True:
        yield "it reports no cached tokens, so the canary can prove nothing", "--enable-cache-report"
    if config.trainer.routing_replay and info.get("enable_return_routed_experts") is not True:
        yield "it returns no routed experts", "--enable-return-routed-experts"
    if (dtype := info.get("dtype")) != config.engine.dtype:
        yield f"dtype {dtype}, engine.dtype is {config.engine.dtype}", f"--dtype {config.engine.dtype}"


def health(seen: HealthSeen) -> Check:
    """Does the service make progress?"""
    name = f"health {seen.service}"
    if seen.alive:
        return Check(name, Status.OK, seen.sentence)
    return Check(name, Status.FAIL, seen.sentence, "progress, or nothing to do", "see its log, then docs/operations.md")


def lag(config: RunConfig, found: float | None) -> Iterator[Check]:
    """Is what trains young enough?"""
    if found is None:
        return
    most = config.trainer.max_lag
    told = f"{found:g} updates"
    if found > most:
        do = "fewer episodes at a time (rollout.concurrency), or more engines: docs/operations.md"
        yield Check("trainer lag", Status.WARN, told, f"at most {most} (trainer.max_lag)", do)
    else:
        yield Check("trainer lag", Status.OK, told)


def clock(seen: Clock) -> Check:
    """Do two machines agree on the time?"""
    name, off = f"clock {seen.whose}", max(abs(seen.ahead_s) - seen.unsure_s, 0.0)
    found = f"{seen.ahead_s:+.1f} s against this machine"
    if off <= CLOCK_WARN_S:
        return Check(name, Status.OK, found)
    status = Status.FAIL if off > CLOCK_FAIL_S else Status.WARN
    return Check(name, status, found, f"within {CLOCK_WARN_S:g} s", "let NTP set both clocks: leases and ids tell time")


def disk(seen: Disk, least_free: int) -> Check:
    """Is there room?"""
    name = f"disk {seen.what}"
    if seen.free is None:
        do = "fine where it is mounted elsewhere; then run this there too"
        return Check(name, Status.WARN, f"{seen.path} is not on this machine", "the folder", do)
    used = 1 - seen.free / seen.total
    found = f"{seen.free >> 20} MiB free, {used:.0%} used ({seen.path})"
    if seen.free < least_free:
        expected = f"{least_free >> 20} MiB free (checkpoint.free_space_mb)"
        return Check(name, Status.FAIL, found, expected, "make room, or a larger volume")
    if used >= DISK_WARN:
        return Check(name, Status.WARN, found, f"below {DISK_WARN:.0%}", "make room before it is full")
    return Check(name, Status.OK, found)


def packages(found: Mapping[str, tuple[str, str | None]]) -> Iterator[Check]:
    """Is what is installed new enough?"""
    if not found:
        return
    lacking = {
        name: (oldest, there)
        for name, (oldest, there) in found.items()
        if there is None or _numbers(there) < _numbers(oldest)
    }
    if not lacking:
        told = ", ".join(f"{name} {there}" for name, (_, there) in sorted(found.items()))
        yield Check("packages", Status.OK, told)
    for name, (oldest, there) in sorted(lacking.items()):
        do = "install from requirements/*.lock"
        yield Check(f"package {name}", Status.FAIL, there or "not installed", f"{oldest} or newer", do)


def protocol(digest: str) -> Iterator[Check]:
    """Which wire contract is this? To compare between images."""
    if digest:
        yield Check("protocol", Status.OK, f"sao.v1 {digest}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
