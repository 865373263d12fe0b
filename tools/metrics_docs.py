"""`python -m tools.metrics_docs` writes docs/metrics.md from the metrics that the services declare."""

from __future__ import annotations

import importlib
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
MODULES = {
    "process": "sao.telemetry.metrics",
    "ingest": "services.rollout.ingest.metrics",
    "rollout": "services.rollout.metrics",
    "reward": "services.reward.metrics",
    "trainer": "services.trainer.metrics",
    "weights": "services.weights.metrics",
}
HEAD = """# Metrics

Every process serves `/metrics`, `/healthz` (200 while it makes progress or has nothing to do, 503 when it is stalled)
and `/readyz`. Where each one listens is in the run folder's `run.toml`, and `sao status` prints it.

Under *Process* is what each of them says of itself; `process_resident_memory_bytes`, `process_open_fds` and the other
metrics of prometheus_client are there as well.

This page is made from the code: `python -m tools.metrics_docs`; a test compares the two, and the end-to-end test finds
every row in a running system.
"""


def declared(service: str) -> list[tuple[str, str, str, str]]:
    """(name, type, labels, meaning) of each metric in the service's metrics.py, by name."""
    rows = []
    for metric in vars(importlib.import_module(MODULES[service])).values():
        if isinstance(metric, MetricWrapperBase):
            family = next(iter(metric.describe()))
            name = f"{family.name}_total" if family.type == "counter" else family.name
            rows.append((name, family.type, ", ".join(metric._labelnames), family.documentation))  # noqa: SLF001 - no public way
    return sorted(rows)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for service in MODULES:
        parts.append(f"## {service.capitalize()}\n\n| name | type | labels | meaning |\n|---|---|---|---|")
        parts[-1] += "".join(
            f"\n| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in declared(service)
        )
        parts[-1] += "\n"
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
