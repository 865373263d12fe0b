"""The expressions of the checked-in dashboards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tools.monitoring.rules import MONITORING


@dataclass(frozen=True)
class Panel:
    """One expression of a dashboard: of a panel, or of an annotation."""

    name: str
    """Dashboard, title and letter."""
    expr: str
    legend: str = ""
    is_annotation: bool = False


def dashboard_names() -> list[str]:
    """The dashboards that are checked in."""
    return sorted(path.stem for path in (MONITORING / "dashboards").glob("*.json"))


def panel_expressions(dashboard: str) -> Iterator[Panel]:
    """Every expression of one of them."""
    board = json.loads((MONITORING / "dashboards" / f"{dashboard}.json").read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            name = f"{dashboard}/{panel['title']}/{target['refId']}"
            yield Panel(name, target["expr"], target.get("legendFormat", ""))
    for annotation in board["annotations"]["list"]:
        yield Panel(f"{dashboard}/{annotation['name']}", annotation["expr"], is_annotation=True)


def plain(expr: str) -> str:
    """The expression with Grafana's variables replaced: all runs, jobs and instances, windows of 5 minutes."""
    return re.sub(r"\$(run|job|instance)\b", ".*", expr.replace("$__rate_interval", "5m"))
