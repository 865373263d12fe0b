"""The rules let through what the reader of the policies says, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.deploy import files
from tests.unit.tools.network.manifests import NAME, deny_all, peer, policy, port, workload
from tools.manifests import edges
from tools.manifests.edges import ANY, Edge, pod_name
from tools.manifests.render import OVERLAYS, Object
from tools.network.hosts import Host, hosts
from tools.network.rules import Rule, translate

TWO_OF_EACH = 2


def passing(objects: Sequence[Object]) -> set[Edge]:
    """What the translated rules let through between two different pods, as edges between kinds of pods."""
    workloads = {
        one["metadata"]["name"]: TWO_OF_EACH for one in objects if one["kind"] in {"Deployment", "StatefulSet"}
    }
    there = [*hosts(objects, workloads), *_second(objects)]
    ruleset = translate(objects, there)
    ports = {port for one in objects if one["kind"] == "NetworkPolicy" for port in edges.ports_of(one)}
    found = {
        Edge(pod_name(source.peer), pod_name(target.peer), one)
        for source in there
        for target in there
        for one in ports
        if source != target and "sao" in {source.peer.namespace, target.peer.namespace}
        if ruleset.passes(source, target, one)
    }
    whole = {(one.source, one.target) for one in found if one.port == ANY}
    return {one for one in found if one.port == ANY or (one.source, one.target) not in whole}


def _second(objects: Sequence[Object]) -> list[Host]:
    """Another pod of each template of a LeaderWorkerSet: the reader's edges are between kinds, itself included."""
    found = [host for host in hosts(objects) if host.pod is not None and "LeaderWorkerSet" in host.pod.owner]
    return [
        Host(f"{host.name}-more", host.peer, f"10.231.9.{index}", host.pod)
        for index, host in enumerate(found)
        if host.name.endswith("-0")
    ]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlays_rules_are_its_edges(overlay: str) -> None:
    objects = files.overlay(overlay)
    assert passing(objects) == edges.allowed(objects)


NAMES = ("a", "b", "c")
peers = st.one_of(
    st.sampled_from([peer(name) for name in NAMES]),
    st.sampled_from([peer("prometheus", "monitoring"), {"namespaceSelector": {}}, {"podSelector": {}}]),
)
terms = st.fixed_dictionaries(
    {"ports": st.lists(st.sampled_from([port(1), port(2), port(2, "UDP")]), max_size=2)},
)
selectors = st.sampled_from(
    [None, {}, {"matchExpressions": [{"key": NAME, "operator": "In", "values": ["a", "c"]}]}],
)


@st.composite
def policies(draw: st.DrawFn) -> list[Object]:
    made = []
    for _ in range(draw(st.integers(0, 4))):
        way = draw(st.sampled_from(["ingress", "egress"]))
        rules = draw(st.lists(terms, max_size=2))
        for rule in rules:
            if whom := draw(st.none() | st.lists(peers, max_size=2)):
                rule["from" if way == "ingress" else "to"] = whom
        made.append(policy(draw(st.sampled_from(NAMES)), way, rules, selector=draw(selectors)))
    return made


@settings(max_examples=100)
@given(policies())
def test_any_policies_rules_are_their_edges(made: list[Object]) -> None:
    objects = [*(workload(name) for name in NAMES), *made]
    assert passing(objects) == edges.allowed(objects)


A_TO_B = [
    workload("a"),
    workload("b"),
    deny_all(),
    policy("a", "egress", [{"to": [peer("b")], "ports": [port(7)]}]),
    policy("b", "ingress", [{"from": [peer("a"), peer("prometheus", "monitoring")], "ports": [port(7)]}]),
]


def test_a_host_is_closed_and_each_of_its_edges_one_line() -> None:
    there = hosts(A_TO_B)
    a, b, *outside = there
    told = translate(A_TO_B, there)
    prometheus = next(host for host in outside if host.name == "prometheus")
    assert [line for line in told.restore(b).splitlines() if "dport" in line or "DROP" in line] == [
        ":INPUT DROP [0:0]",
        ":OUTPUT DROP [0:0]",
        ":FORWARD DROP [0:0]",
        f"-A INPUT -s {a.address}/32 -p tcp --dport 7 -j ACCEPT",
        f"-A INPUT -s {prometheus.address}/32 -p tcp --dport 7 -j ACCEPT",
    ]
    assert f"-A OUTPUT -d {b.address}/32 -p tcp --dport 7 -j ACCEPT" in told.restore(a)
    assert told.restore(prometheus).count("ACCEPT [0:0]") == 2, "no policy of ours closes another namespace"
    assert "dport" not in told.restore(prometheus)


def test_an_edge_is_closed_by_taking_the_rules_of_either_end() -> None:
    there = hosts(A_TO_B, {"a": 2})
    told = translate(A_TO_B, there)
    edge = Edge("a", "b", "7/TCP")
    b = next(host for host in there if host.name == "b-0")
    first, second = (host for host in there if "a" in host.peer.roles)
    out = told.of_edge(there, edge, "OUTPUT")
    assert out == [Rule(host.name, "OUTPUT", b.address, "7/TCP") for host in (first, second)]
    assert told.of_edge(there, edge, "INPUT") == [
        Rule("b-0", "INPUT", host.address, "7/TCP") for host in (first, second)
    ]
    assert told.of_edge(there, Edge("prometheus", "b", "7/TCP"), "OUTPUT") == [], "its own end is open"
    assert told.of_edge(there, Edge("a", "b", "8/TCP"), "OUTPUT") == []


def test_addresses_and_names_are_each_pods_own() -> None:
    there = hosts([workload("a", replicas=3)], {"a": 2})
    assert [host.name for host in there[:3]] == ["a-0", "a-1", "prometheus"]
    assert len({host.address for host in there}) == len(there)
