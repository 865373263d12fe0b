"""Small workloads, Services and NetworkPolicies."""

from __future__ import annotations

from typing import Any

NAME = "app.kubernetes.io/name"


def workload(name: str, *, kind: str = "Deployment", replicas: int = 1, **spec: Any) -> dict[str, Any]:
    template = {"metadata": {"labels": {NAME: name}}, "spec": {"containers": [], **spec}}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "template": template},
    }


def policy(name: str, way: str, rules: list[dict[str, Any]], *, selector: Any = None) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{name}-{way}", "namespace": "sao"},
        "spec": {
            "podSelector": {"matchLabels": {NAME: name}} if selector is None else selector,
            "policyTypes": [way.capitalize()],
            way: rules,
        },
    }


def deny_all() -> dict[str, Any]:
    one = policy("all", "egress", [], selector={})
    one["spec"]["policyTypes"] = ["Ingress", "Egress"]
    return one


def peer(name: str, namespace: str = "") -> dict[str, Any]:
    term: dict[str, Any] = {"podSelector": {"matchLabels": {NAME: name}}}
    if namespace:
        term["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    return term


def port(number: int, protocol: str = "TCP") -> dict[str, Any]:
    return {"port": number, "protocol": protocol}
