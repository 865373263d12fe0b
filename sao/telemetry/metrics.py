"""What every process says of itself, beside what prometheus_client adds: memory, CPU, open files."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from prometheus_client import Gauge

TASKS = Gauge("sao_process_tasks", "Tasks of the event loop that have not ended")
DISK_USED = Gauge(
    "sao_process_disk_used_ratio", "Used share of the file system behind a folder this process writes", ["folder"]
)


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
