"""One table of connections: what docs/architecture.md says is what the policies allow and what the code dials."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest

from sao.config import load_run_config
from tests.unit.deploy import files
from tests.unit.deploy.imports import file_of, reached
from tools.manifests import edges
from tools.manifests.edges import Edge
from tools.manifests.render import OVERLAYS

ENTRIES = {
    "ingest": "services.rollout.ingest",
    "rollout": "services.rollout",
    "reward": "services.reward",
    "trainer": "services.trainer",
    "weights": "services.weights",
}
STORE_CLIENT = re.compile(r"^\s*(?:import|from) redis\b", re.MULTILINE)
CLIENT = re.compile(
    r"^\s*(?:import|from) (?:httpx|aiohttp|requests|websockets|urllib\.request|http\.client|boto3|openai"
    r"|opentelemetry\.exporter)\b"
    r"|\b(?:in)?secure_channel\(|\bcreate_connection\(|\bopen_connection\(|\bgetaddrinfo\(",
    re.MULTILINE,
)
"""What a module that opens connections has in its source."""
DIALS = {
    "services.rollout.ingest_client": ("ingest", "50051/TCP"),
    "services.rollout.engines.sglang": ("engine", "30000/TCP"),
    "services.weights.engines.sglang": ("engine", "30000/TCP"),
    "services.weights.discovery.dns": ("dns", "53/UDP"),
}
"""Whom each of those reaches: one that is not here, or reaches somebody new, needs a row in docs/architecture.md."""
NAMED_BY_THE_RUN_FILE = {
    "services.reward.scorers.remote",
    "services.reward.scorers.http",
    "services.reward.scorers.judge",
}
"""These reach what `[reward.scorers]` names, and nobody by default: who does names the edge in an overlay."""
TRACES = "sao.telemetry.traces.otlp"
"""Reaches what `traces.endpoint` names, and nobody by default: the overlay `traces` has the edges."""


def dialled(service: str) -> set[Edge]:
    """What the modules that a service may import connect to; AssertionError for one that nobody has placed."""
    sources = {module: path.read_text() for module in reached(ENTRIES[service]) if (path := file_of(module))}
    clients = {module for module, source in sources.items() if CLIENT.search(source)} - NAMED_BY_THE_RUN_FILE - {TRACES}
    assert clients <= set(DIALS), "who is dialled there?"
    store = {("valkey", "6379/TCP")} if any(STORE_CLIENT.search(source) for source in sources.values()) else set()
    return {Edge(service, *whom) for whom in {*store, *(DIALS[module] for module in clients)}}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_policies_allow_exactly_the_table(overlay: str) -> None:
    assert edges.differences(files.overlay(overlay), overlay) == []


@pytest.mark.parametrize("service", ENTRIES)
def test_the_table_is_what_the_code_dials(service: str) -> None:
    names = {Edge(service, "dns", "53/UDP"), Edge(service, "dns", "53/TCP")}
    assert {edge for edge in edges.documented("cpu") if edge.source == service} == names | dialled(service)


@pytest.mark.parametrize("service", ENTRIES)
def test_who_records_spans_may_send_them_and_is_told_where_to(service: str) -> None:
    source = file_of(TRACES)
    assert source is not None
    assert CLIENT.search(source.read_text())
    assert TRACES in reached(ENTRIES[service])
    assert edges.documented("traces") - edges.documented("gpu") == {
        Edge(one, "collector", "4317/TCP") for one in ENTRIES
    }
    config = load_run_config(env={name: value for one in containers("traces", service) for name, value in one.items()})
    assert urlsplit(config.traces.endpoint).port == 4317


def containers(overlay: str, service: str) -> list[dict[str, str]]:
    """Settings in the environment of each container that runs a service."""
    found = [one for one in files.containers(files.overlay(overlay)) if one.module == ENTRIES[service]]
    assert found
    return [one.settings for one in found]


def test_engines_and_the_store_dial_nobody() -> None:
    assert {edge for edge in edges.documented("cpu") if edge.source in {"engine", "valkey"}} == set()


def test_every_service_is_scraped_and_nobody_else_gets_in() -> None:
    table = edges.documented("cpu")
    assert {edge.target for edge in table if edge.source == "prometheus"} == {*ENTRIES, "engine"}
    assert not any("stranger" in {edge.source, edge.target} for edge in edges.allowed(files.overlay("cpu")))


def policy(name: str, way: str, rules: list[object]) -> dict[str, object]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": "sao"},
        "spec": {
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": name}},
            "policyTypes": [way.capitalize()],
            way: rules,
        },
    }


def workload(name: str) -> dict[str, object]:
    labels = {"app.kubernetes.io/name": name}
    template = {"metadata": {"labels": labels}, "spec": {"containers": []}}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": {"template": template}}


def to(name: str) -> dict[str, object]:
    return {"podSelector": {"matchLabels": {"app.kubernetes.io/name": name}}}


PORT = {"protocol": "TCP", "port": 1}


def allowed(*policies: dict[str, object]) -> set[tuple[str, str]]:
    found = edges.allowed([workload("a"), workload("b"), *policies])
    return {
        (edge.source, edge.target)
        for edge in found
        if edge.port == "1/TCP" and {edge.source, edge.target} <= {"a", "b"}
    }


EVERY_PAIR = {("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")}


def test_a_pod_that_no_policy_selects_is_open_and_a_selected_one_closed() -> None:
    assert allowed(policy("c", "egress", [{"ports": [PORT]}])) == EVERY_PAIR
    assert allowed(policy("c", "egress", [{"ports": [PORT]}]), policy("a", "egress", [])) == {("b", "a"), ("b", "b")}


def test_an_edge_needs_both_of_its_ends() -> None:
    out = policy("a", "egress", [{"to": [to("b")], "ports": [PORT]}])
    assert ("a", "b") in allowed(out)
    assert ("a", "b") not in allowed(out, policy("b", "ingress", []))
    assert ("a", "b") in allowed(out, policy("b", "ingress", [{"from": [to("a")], "ports": [PORT]}]))
    assert ("a", "a") not in allowed(out)


def test_a_selector_for_another_namespace_is_not_for_this_one() -> None:
    term = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "other"}}, **to("b")}
    assert ("a", "b") not in allowed(policy("a", "egress", [{"to": [term], "ports": [PORT]}]))
