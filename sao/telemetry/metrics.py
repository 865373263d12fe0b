"""What every process says of itself, beside what prometheus_client adds: memory, CPU, open files."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from prometheus_client import Counter, Gauge

TASKS = Gauge("sao_process_tasks", "Tasks of the event loop that have not ended")
DISK_USED = Gauge(
    "sao_process_disk_used_ratio", "Used share of the file system behind a folder this process writes", ["folder"]
)
SPANS_EXPORTED = Counter("sao_process_trace_spans_exported_total", "Spans of traces that the collector took")
SPANS_DROPPED = Counter(
    "sao_process_trace_spans_dropped_total",
    "Spans of traces dropped: the queue was full, the collector did not take them, or the process ended",
    ["reason"],
)
for _reason in ("queue_full", "export_failed", "closed"):
    SPANS_DROPPED.labels(_reason)


def watch_disk(folder: str, path: Path) -> None:
    """Show how full the disk behind `path` is, as `folder`, read anew at each scrape; NaN while it cannot be read."""
    DISK_USED.labels(folder).set_function(lambda: _used(path))


def _used(path: Path) -> float:
    try:
        usage = shutil.disk_usage(next(at for at in (path, *path.absolute().parents) if at.exists()))
    except OSError:
        return math.nan
    # As df has it: what is reserved for root is neither used nor to be had.
    return usage.used / max(usage.used + usage.free, 1)
