"""`python -m tools.monitoring.rules` writes the PrometheusRule object from the plain rule files."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
OBJECT = MONITORING / "prometheusrule.yaml"
HEAD = "# Made from rules/: python -m tools.monitoring.rules\n"


@dataclass(frozen=True)
class Rule:
    """One recording or alert rule."""

    name: str
    """Of the recorded series, or of the alert."""
    expr: str
    is_alert: bool
    for_: str = "0s"
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


def rule_files() -> list[Path]:
    """The plain rule files, by name."""
    return sorted((MONITORING / "rules").glob("*.yaml"))


@cache
def groups() -> list[dict[str, Any]]:
    """Every group of every file, as it is written."""
    return [
        group
        for path in rule_files()
        for group in yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)["groups"]
    ]


def rules() -> list[Rule]:
    """Every rule."""
    return [
        Rule(
            name=one.get("alert") or one["record"],
            expr=one["expr"],
            is_alert="alert" in one,
            for_=one.get("for", "0s"),
            labels=one.get("labels", {}),
            annotations=one.get("annotations", {}),
        )
        for group in groups()
        for one in group["rules"]
    ]


def alerts() -> list[Rule]:
    """The alerts among them."""
    return [rule for rule in rules() if rule.is_alert]


def prometheus_rule() -> str:
    """The object that the Prometheus operator loads, as YAML."""
    body = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "sao", "labels": {"app.kubernetes.io/part-of": "sao"}},
        "spec": {"groups": groups()},
    }
    return HEAD + yaml.safe_dump(body, sort_keys=False, width=120)


if __name__ == "__main__":
    OBJECT.write_text(prometheus_rule(), encoding="utf-8")
