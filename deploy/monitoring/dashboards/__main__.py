"""Writes the JSON of every dashboard."""

from deploy.monitoring.dashboards import BOARDS, file_of, rendered

for name in BOARDS:
    file_of(name).write_text(rendered(name), encoding="utf-8")
