"""Policies as iptables of real namespaces, a real Valkey behind them, and the doctor that names what is closed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.support.processes import server
from tests.support.valkey import BINARY
from tests.unit.tools.network.manifests import workload
from tools.manifests.edges import Edge
from tools.manifests.render import K8S, Object
from tools.network import reach
from tools.network.check import Told, wrong
from tools.network.hosts import Host, hosts
from tools.network.namespaces import LOCKS, World, lacking, remove_leftovers, world
from tools.network.rules import Ruleset, translate

NEEDED = ("ip", "iptables", "iptables-restore")
HERE = {"valkey-0", "reward-0", "stranger"}
EDGE = Edge("reward", "valkey", "6379/TCP")
STORE = {"containerPort": 6379, "name": "redis"}


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if reason := lacking(NEEDED):
        pytest.skip(f"no network namespaces: {reason}")


def objects() -> list[Object]:
    """The policies that are deployed, and two of the workloads that they are about."""
    policies = list(yaml.safe_load_all((K8S / "base" / "network.yaml").read_text()))
    return [workload("valkey", containers=[{"name": "valkey", "ports": [STORE]}]), workload("reward"), *policies]


@pytest.fixture
def there() -> list[Host]:
    return [host for host in hosts(objects()) if host.name in HERE]


@pytest.fixture
def made(there: list[Host]) -> Iterator[World]:
    with world(there) as one:
        yield one


@pytest.fixture
def ruleset(made: World, there: list[Host]) -> Ruleset:
    found = translate(objects(), there)
    made.close(found)
    return found


@pytest.fixture
def run_file(made: World, ruleset: Ruleset, tmp_path: Path) -> Iterator[Path]:
    assert ruleset
    store = next(host for host in made.hosts if host.name == "valkey-0")
    options = ["--protected-mode", "no", "--save", "", "--appendonly", "yes", "--maxmemory", "64mb"]
    command = made.inside(store, str(BINARY), "--dir", str(tmp_path), *options)
    ping = made.inside(store, sys.executable, "-c", "import redis; redis.Redis().ping()")
    with server(command, log=tmp_path / "valkey.log", ready=lambda: ran(*ping).returncode == 0, timeout_s=15):
        file = tmp_path / "run.toml"
        settings = '[checkpoint]\nfree_space_mb = 1\n[redis]\nembedded = false\nurl = "redis://'
        file.write_text(f'[run]\ndir = "{tmp_path}"\n{settings}{store.address}:6379/0"\n')
        yield file


def ran(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def asked(made: World, run_file: Path) -> Told:
    """What the doctor says in the reward service's namespace."""
    host = next(host for host in made.hosts if host.name == "reward-0")
    command = ["doctor", str(run_file), "--as", "reward", "--timeout", "1", "--json"]
    done = ran(*made.inside(host, sys.executable, "-m", "sao.cli.main", *command))
    return Told(done.returncode, json.loads(done.stdout), 0.0)


def test_the_doctor_names_an_edge_that_is_taken_away_at_either_end(
    made: World, ruleset: Ruleset, run_file: Path
) -> None:
    rules = [ruleset.of_edge(made.hosts, EDGE, chain) for chain in ("OUTPUT", "INPUT")]
    assert [len(one) for one in rules] == [1, 1]
    for one in rules:
        made.remove(one)
        assert wrong(EDGE, asked(made, run_file)) == []
        made.put_back(one)
    assert asked(made, run_file).exit == 0


def test_what_gets_through_is_what_the_rules_say(made: World, ruleset: Ruleset, run_file: Path) -> None:
    assert run_file.exists()
    found = reach.tried(made)
    assert {pair for pair, word in found.items() if word != reach.SILENT} == {("reward-0", "valkey-0", "6379/TCP")}
    assert reach.differences(made, ruleset, found) == []
    made.remove(ruleset.of_edge(made.hosts, EDGE, "INPUT"))
    (problem,) = reach.differences(made, ruleset, reach.tried(made))
    assert problem == "reward-0 -> valkey-0 6379/TCP is an edge, expected answers, found silent"


def test_nothing_is_left_and_what_a_killed_run_left_is_removed(there: list[Host], tmp_path: Path) -> None:
    left, work = "saon-999999999-valkey-0", tmp_path / "work"
    assert ran("ip", "netns", "add", left).returncode == 0
    work.mkdir()
    LOCKS.mkdir(exist_ok=True)
    (LOCKS / "saon-999999999").write_text(str(work))
    with world(there) as made:
        asleep = subprocess.Popen(made.inside(there[0], "sleep", "600"))
        names = ran("ip", "netns", "list").stdout
        assert left not in names
        assert not work.exists()
        assert made.namespace(there[0]) in names
        assert remove_leftovers() == [], "it lives"
    assert asleep.wait(timeout=10) == -9, "what runs in a namespace ends with it"
    assert made.namespace(there[0]) not in ran("ip", "netns", "list").stdout
