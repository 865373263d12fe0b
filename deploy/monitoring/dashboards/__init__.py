"""Grafana dashboards as code: `python -m deploy.monitoring.dashboards` writes the JSON beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from deploy.monitoring.dashboards import fleet, learning, reward, weights
from deploy.monitoring.dashboards.parts import Board

FOLDER = Path(__file__).resolve().parent
BOARDS: Mapping[str, Callable[[], Board]] = {
    "fleet": fleet.board,
    "learning": learning.board,
    "reward": reward.board,
    "weights": weights.board,
}


def file_of(name: str) -> Path:
    """Where the JSON of a dashboard is checked in."""
    return FOLDER / f"{name}.json"


def rendered(name: str) -> str:
    """The JSON of a dashboard, as it is checked in."""
    return BOARDS[name]().json()
