"""Who may connect to whom: what NetworkPolicies allow, and the table of docs/architecture.md that they must equal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.manifests.render import NAME, ROOT, Object, Pod, pods

PAGE = ROOT / "docs" / "architecture.md"
NAMESPACE = "sao"
ROLE = "app.kubernetes.io/component"
ANY = "any"
"""A rule without ports."""
EVERYWHERE = "everywhere"


@dataclass(frozen=True, order=True)
class Edge:
    """One direction of one connection."""

    source: str
    target: str
    port: str
    """`50051/TCP`, or `any`."""


@dataclass(frozen=True)
class Peer:
    """A kind of pod, ours or another's."""

    roles: frozenset[str]
    """A rollout pod that has its engine beside it is both."""
    labels: Mapping[str, str]
    namespace: str = NAMESPACE


OUTSIDE = (
    Peer(frozenset({"prometheus"}), {NAME: "prometheus"}, "monitoring"),
    Peer(frozenset({"dns"}), {"k8s-app": "kube-dns"}, "kube-system"),
    Peer(frozenset({"collector"}), {NAME: "opentelemetry-collector"}, "monitoring"),
    Peer(frozenset({"keda"}), {NAME: "keda-operator"}, "keda"),
    Peer(frozenset({"stranger"}), {NAME: "stranger"}, "default"),
)
"""The stranger is there to show that nobody else gets in."""


def documented(overlay: str) -> set[Edge]:
    """The edges of the page's table that hold in an overlay; ValueError when the page has no such table.

    `overlay` may name components after it, as in `gpu-multi+traces`.
    """
    section = PAGE.read_text().partition("\n## Connections\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (\S+) \| ([^|]+?) \|", section, re.MULTILINE)
    if not rows:
        msg = f"{PAGE}: no table under '## Connections'"
        raise ValueError(msg)
    return {
        Edge(source, target, port)
        for source, target, port, where in rows
        if "/" in port or port == ANY
        if where == EVERYWHERE or set(overlay.split("+")) & set(where.split(", "))
    }


def peers(objects: Sequence[Object]) -> list[Peer]:
    """Every kind of pod of an overlay, and who is outside."""
    return [*(Peer(roles_of(pod), pod.labels) for pod in pods(objects)), *OUTSIDE]


def roles_of(pod: Pod) -> frozenset[str]:
    """What a pod is in the table."""
    role = pod.labels.get(ROLE)
    return frozenset({pod.name, *([role] if role else [])})


def expected(objects: Sequence[Object], table: Iterable[Edge]) -> set[Edge]:
    """The table's edges between the pods that an overlay has: roles that share a pod share its policies."""
    there = peers(objects)
    return {
        Edge(pod_name(source), pod_name(target), edge.port)
        for edge in table
        for source in there
        if edge.source in source.roles
        for target in there
        if edge.target in target.roles
    }


def allowed(objects: Sequence[Object]) -> set[Edge]:
    """What the policies of an overlay let through, between any two kinds of pod."""
    policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
    there = peers(objects)
    ports = {port for one in policies for port in ports_of(one)}
    found = {
        Edge(pod_name(source), pod_name(target), port)
        for source in there
        for target in there
        if NAMESPACE in {source.namespace, target.namespace}
        for port in ports
        if _passes(policies, "egress", source, target, port) and _passes(policies, "ingress", target, source, port)
    }
    whole = {(one.source, one.target) for one in found if one.port == ANY}
    return {one for one in found if one.port == ANY or (one.source, one.target) not in whole}


def pod_name(peer: Peer) -> str:
    """How an edge between pods names one: its roles."""
    return "+".join(sorted(peer.roles))


def differences(objects: Sequence[Object], overlay: str) -> list[str]:
    """What is allowed and not in the table, or in the table and not allowed."""
    wanted, found = expected(objects, documented(overlay)), allowed(objects)
    return [
        *(f"{one.source} -> {one.target} {one.port}: in {PAGE.name}, not allowed" for one in sorted(wanted - found)),
        *(f"{one.source} -> {one.target} {one.port}: allowed, not in {PAGE.name}" for one in sorted(found - wanted)),
    ]


def ports_of(policy: Object) -> set[str]:
    """Every port that a policy's rules name, and `any` for those that name none."""
    rules = [*(policy["spec"].get("ingress") or []), *(policy["spec"].get("egress") or [])]
    return {text for rule in rules for text in (_port_texts(rule) or {ANY})}


def _port_texts(rule: Mapping[str, Any]) -> set[str]:
    return {f"{one['port']}/{one.get('protocol', 'TCP')}" for one in rule.get("ports") or []}


def _passes(policies: Sequence[Object], way: str, subject: Peer, other: Peer, port: str) -> bool:
    """Whether `subject`'s own policies let it send to (egress) or be reached by (ingress) `other`."""
    if subject.namespace != NAMESPACE:
        return True
    mine = [
        one["spec"]
        for one in policies
        if way.capitalize() in one["spec"]["policyTypes"] and selects(one["spec"]["podSelector"], subject.labels)
    ]
    if not mine:
        return True
    return any(_rule_allows(rule, way, other, port) for spec in mine for rule in spec.get(way) or [])


def _rule_allows(rule: Mapping[str, Any], way: str, other: Peer, port: str) -> bool:
    texts = _port_texts(rule)
    if texts and port not in texts:
        return False
    whom = rule.get("to" if way == "egress" else "from")
    return whom is None or any(matches(one, other) for one in whom)


def matches(term: Mapping[str, Any], other: Peer) -> bool:
    """Whether a term under `from` or `to` means this peer; addresses mean nobody that has a name here."""
    if "ipBlock" in term:
        return False
    if "namespaceSelector" in term:
        if not selects(term["namespaceSelector"], {"kubernetes.io/metadata.name": other.namespace}):
            return False
    elif other.namespace != NAMESPACE:
        return False
    return "podSelector" not in term or selects(term["podSelector"], other.labels)


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector finds a pod of these labels; ValueError for an unknown operator."""
    exact = all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
    return exact and all(_expression(one, labels) for one in selector.get("matchExpressions") or [])


def _expression(term: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(term["key"])
    match term["operator"]:
        case "In":
            return value in term["values"]
        case "NotIn":
            return value not in term["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    msg = f"unknown operator {term['operator']!r} in a label selector; expected In, NotIn, Exists or DoesNotExist"
    raise ValueError(msg)
