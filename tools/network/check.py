"""Take each edge away, and hear what `sao doctor` says, judged by `wrong`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tools.manifests.edges import Edge
from tools.network.hosts import Host
from tools.network.namespaces import World
from tools.network.rules import Chain, Rule, Ruleset
from tools.network.stack import Stack

DOCTOR_S = 4
"""More than the default: the whole stack is at work on the same cores."""
SERVICES = {"ingest": 9100, "rollout": 9100, "reward": 8080, "trainer": 9100, "weights": 8080}
"""Where Prometheus finds each."""
CONTAINERS = {"rollout": "worker"}
"""Of a pod whose container has another name."""
FAILED_EDGE = re.compile(r"^edge (?P<source>\w+) -> (?P<target>\w+)(?: (?P<rest>\S+))?$")


@dataclass(frozen=True)
class Told:
    """What one doctor said."""

    exit: int
    checks: Sequence[Mapping[str, str]]
    seconds: float

    def of(self, status: str) -> list[str]:
        """Names and findings of that status."""
        return [f"{one['check']}: {one['found']}" for one in self.checks if one["status"] == status]


@dataclass(frozen=True)
class Tried:
    """One edge, taken away and put back."""

    edge: str
    end: str
    """At whose end."""
    rules: int
    said: Sequence[str]
    """What fails without it."""
    untried: Sequence[str]
    """What the doctor could not ask without it: warnings beyond those of before."""
    seconds: float
    problems: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """For the result."""
        return asdict(self)


def doctor(stack: Stack, role: str) -> Told:
    """`sao doctor --as ROLE` in that pod; ValueError with what it says when that is no answer."""
    host = stack.host(role)
    argv = ["python", "-m", "sao.cli.main", "doctor", "/etc/sao/run.toml", "--as", role, "--json"]
    argv += ["--timeout", str(DOCTOR_S)]
    if role == "prometheus":
        for name, port in SERVICES.items():
            argv += ["--service", f"{name}=http://{name}:{port}"]
    start = time.monotonic()
    done = stack.execute(host, CONTAINERS.get(role, role), argv)
    try:
        checks = json.loads(done.stdout)
    except ValueError as error:
        msg = f"sao doctor in {host.name} ends with {done.returncode}: {done.stdout}{done.stderr}"
        raise ValueError(msg) from error
    return Told(done.returncode, checks, round(time.monotonic() - start, 1))


@dataclass(frozen=True)
class Status:
    """What `sao status` said."""

    exit: int
    said: Sequence[str]


def status(stack: Stack, role: str) -> Status:
    """`sao status` by the run file, in that role's pod."""
    argv = ["python", "-m", "sao.cli.main", "status", "/etc/sao/run.toml"]
    done = stack.execute(stack.host(role), CONTAINERS.get(role, role), argv)
    return Status(done.returncode, [" ".join(line.split()) for line in f"{done.stdout}{done.stderr}".splitlines()])


def try_edges(
    world: World, stack: Stack, ruleset: Ruleset, table: Sequence[Edge], well: Mapping[str, Told]
) -> Iterator[Tried]:
    """Each edge of the table in turn; `well`: what each source's doctor said with all of them."""
    for index, edge in enumerate(table):
        chain, rules = _rules_of(ruleset, world.hosts, edge, prefer_source=index % 2 == 0)
        world.remove(rules)
        try:
            told = doctor(stack, edge.source)
        finally:
            world.put_back(rules)
        problems = wrong(edge, told) if rules else ["no rule stands for it"]
        after = doctor(stack, edge.source)
        if after.exit:
            problems.append(f"put back, the doctor still says: {'; '.join(after.of('fail'))}")
        before = {one["check"] for one in well[edge.source].checks if one["status"] == "warn"}
        untried = [one for one in told.of("warn") if one.partition(":")[0] not in before and "not tried" in one]
        name = f"{edge.source} -> {edge.target} {edge.port}"
        end = edge.source if chain == "OUTPUT" else edge.target
        yield Tried(name, end, len(rules), told.of("fail"), untried, told.seconds, problems)


def _rules_of(
    ruleset: Ruleset, hosts: Sequence[Host], edge: Edge, *, prefer_source: bool
) -> tuple[Chain, Sequence[Rule]]:
    """One end's rules: the other's where that end is not ours."""
    ends: list[Chain] = ["OUTPUT", "INPUT"] if prefer_source else ["INPUT", "OUTPUT"]
    for chain in ends:
        if rules := ruleset.of_edge(hosts, edge, chain):
            return chain, rules
    return "OUTPUT", []


def wrong(edge: Edge, told: Told) -> list[str]:
    """What a doctor that was asked without this edge should have said otherwise: it fails, and names it alone."""
    problems = [] if told.exit == 1 else [f"exit {told.exit}, expected 1"]
    named = set()
    for check in (one["check"] for one in told.checks if one["status"] == "fail"):
        match = FAILED_EDGE.match(check)
        if match is None:
            problems.append(f"unrelated: {check}")
            continue
        port = f" {match['rest']}" if match["target"] == "dns" else ""
        named.add(f"{match['source']} -> {match['target']}{port}")
    port = f" {edge.port}" if edge.target == "dns" else ""
    if named != {f"{edge.source} -> {edge.target}{port}"}:
        problems.append(f"names {', '.join(sorted(named)) or 'no edge'}")
    return problems
