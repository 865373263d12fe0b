"""Batches that real runs trained on (tests/data/recorded), and the tables worked out by hand about them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from google.protobuf.json_format import ParseDict

from sao.outcome import OUTCOME, RewardOutcome
from sao.trajectory import Trajectory
from sao.v1 import archive_pb2 as pb
from sao.v1 import trajectory_pb2

DATA = Path(__file__).resolve().parents[1] / "data"


@dataclass(frozen=True)
class Recorded:
    """One trajectory as a run trained on it; the lists run over its action tokens, in the digits of the file."""

    trajectory: Trajectory
    outcome: RewardOutcome
    reward: float
    values: list[float]
    """Empty where the run had no critic."""
    ratios: list[float]
    advantages: list[float]

    def sampled_in(self, run: str, version: str) -> trajectory_pb2.Trajectory:
        """The wire message, as if one version of another run had sampled all of it."""
        message = trajectory_pb2.Trajectory()
        message.CopyFrom(self.trajectory.message)
        message.run = run
        for segment in message.segments:
            for span in segment.versions:
                span.version = version
        return message


def recorded(name: str) -> list[Recorded]:
    """The trajectories of one file of tests/data/recorded, in the order in which the run trained on them."""
    entries = json.loads((DATA / "recorded" / f"{name}.json").read_text(encoding="utf-8"))["trajectories"]
    found = []
    for entry in entries:
        trained = ParseDict(entry, pb.TrainedTrajectory())
        numbers = (entry.get(key, []) for key in ("values", "ratios", "advantages"))
        outcome = OUTCOME.validate_json(trained.outcome_json)
        found.append(Recorded(Trajectory(trained.trajectory), outcome, trained.reward, *numbers))
    return found


Table = list[dict[str, str]]
"""Rows, each by column."""


def tables(name: str) -> dict[str, Table]:
    """The table under each heading of one file of tests/data/advantages, in its order."""
    found: dict[str, Table] = {}
    columns: list[str] = []
    for line in (DATA / "advantages" / f"{name}.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            columns, rows = [], found.setdefault(line.removeprefix("## "), [])
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not columns:
                columns = cells
            elif set(line) > set("|-"):
                rows.append(dict(zip(columns, cells, strict=True)))
    return found


def number(cell: str) -> float:
    """The number that a cell's working ends in: `0 - 1/4 = -1/4` is -0.25."""
    return float(Fraction(cell.rpartition("=")[2].strip()))


def column(table: Table, name: str) -> list[float]:
    """The numbers of one column."""
    return [number(row[name]) for row in table]
