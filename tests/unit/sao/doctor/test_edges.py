"""The edges that are tried are those of docs/architecture.md."""

from __future__ import annotations

import re
from pathlib import Path

from sao.config import load_run_config
from sao.doctor.edges import DIALS, Role, edges, host_of, hosts, name_edges

PAGE = Path(__file__).parents[4] / "docs" / "architecture.md"
ROW = re.compile(r"^\| (\w+) \| (\w+) \| \d+/TCP \| everywhere \|", re.MULTILINE)
K8S = load_run_config(Path(__file__).parents[4] / "deploy/k8s/base/run.toml", env={})


def test_every_edge_of_the_documented_table_is_tried() -> None:
    documented = {pair for pair in ROW.findall(PAGE.read_text()) if pair[1] != "dns"}
    assert documented == {(role.value, target) for role, targets in DIALS.items() for target in targets}


def test_an_address_that_several_dial_is_tried_once_and_named_for_all() -> None:
    config = load_run_config(None, ['redis.url="redis://u:hush@v:7/0"', 'ingest.target="i:1"'], env={})
    found = edges(config, Role, {"trainer": "http://t:2"}, ["http://e:3", "http://e:4"])
    told = {(edge.target, edge.address): edge.sources for edge in found}
    assert told["valkey", "v:7"] == ("rollout", "ingest", "reward", "trainer", "weights")
    assert told["engine", "http://e:4"] == ("rollout", "weights", "prometheus")
    assert told["ingest", "i:1"] == ("rollout",)
    assert told["trainer", "http://t:2"] == ("prometheus",)
    assert told["reward", ""] == ("prometheus",), "its port is open, and nobody said where it is"
    assert "hush" not in str(found)


def test_a_pod_tries_its_own_edges_alone() -> None:
    found = edges(K8S, [Role.REWARD], {}, [])
    assert [(edge.name, edge.address) for edge in found] == [("reward -> valkey", "valkey:6379")]
    assert [edge.target for edge in edges(K8S, [Role.ROLLOUT], {}, ["http://10.0.0.1:30000"])] == [
        "ingest",
        "engine",
        "valkey",
    ]


def test_where_traces_go_to_a_collector_every_service_dials_it() -> None:
    traced = load_run_config(None, ["traces.endpoint='http://collector:4317'"], env={})
    (found,) = [edge for edge in edges(traced, Role, {}, []) if edge.target == "collector"]
    documented = re.findall(r"^\| (\w+) \| collector \| 4317/TCP \| traces \|", PAGE.read_text(), re.MULTILINE)
    assert set(found.sources) == set(documented)
    assert found.address == "collector:4317"
    assert hosts(traced, "collector") == ["collector"]
    assert not [edge for edge in edges(K8S, Role, {}, []) if edge.target == "collector"]


def test_who_needs_a_name_asks_each_server_both_ways() -> None:
    documented = set(re.findall(r"^\| (\w+) \| dns \| (53/\w+) \| everywhere \|", PAGE.read_text(), re.MULTILINE))
    roles = {role.value for role in Role if role is not Role.PROMETHEUS}
    assert documented == {(role, f"53/{protocol}") for role in roles for protocol in ("UDP", "TCP")}
    found = name_edges(K8S, list(Role), ["valkey", "ingest", "rollout"], ["10.96.0.10", "10.96.0.11"])
    assert {edge.address for edge in found} == {
        f"10.96.0.1{n}:53/{protocol}" for n in (0, 1) for protocol in ("UDP", "TCP")
    }
    assert {edge.sources for edge in found} == {("rollout", "ingest", "reward", "trainer", "weights")}
    (udp, tcp) = name_edges(K8S, [Role.REWARD], ["valkey", "ingest", "rollout"], ["10.96.0.10"])
    assert (udp.name, tcp.name) == ("reward -> dns 53/UDP", "reward -> dns 53/TCP")


def test_who_needs_no_name_asks_nobody() -> None:
    assert name_edges(K8S, [Role.PROMETHEUS], ["valkey", "rollout"], ["10.96.0.10"]) == []
    assert name_edges(K8S, list(Role), [], ["10.96.0.10"]) == [], "all of them are addresses"
    assert name_edges(K8S, [Role.REWARD], ["rollout"], ["10.96.0.10"]) == [], "it dials no engine"


def test_the_hosts_of_each_target() -> None:
    assert [hosts(K8S, target) for target in ("valkey", "ingest", "engine", "trainer")] == [
        ["valkey"],
        ["ingest"],
        ["rollout"],
        [],
    ]
    fixed = load_run_config(None, ['engine.urls=["http://[::1]:3", "http://e:4"]'], env={})
    assert hosts(fixed, "engine") == ["::1", "e"]
    assert [host_of(one) for one in ("http://a:1/x", "a:1", "")] == ["a", "a", ""]
