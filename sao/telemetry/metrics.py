"""What every process says of itself, beside what prometheus_client adds: memory, CPU, open files."""

from __future__ import annotations

from prometheus_client import Gauge

TASKS = Gauge("sao_process_tasks", "Tasks of the event loop that have not ended")
