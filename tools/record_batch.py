r"""`python -m tools.record_batch RUN UPDATE [UPDATE ...]` prints updates of a run's archive as readable JSON.

tests/data/recorded holds two batches, each with the algorithm, the updates and the commit it is from. To record again:

    sao up --preset tiny --seed 2 --updates 24 --set task.prompts=tests/data/recorded/prompts.jsonl --run-dir runs/one
    sao up --preset tiny --updates 6 --set trainer.algorithm=grpo_dis --set group.size=4 \
        --set trainer.trajectories_per_update=8 --run-dir runs/four

and what tests/data/advantages works out by hand from them has to be worked out again. Three prompts, so that each
comes more than once among eight trajectories; which updates show both rewards, long and short ones, is chance.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from sao.archive import Archive
from sao.v1 import archive_pb2 as pb

ROOT = Path(__file__).resolve().parents[1]
_OF_NO_INTEREST = ("run", "lease_id", "traceparent", "engine_id", "worker_id")


def recording(run: Path, updates: Sequence[int]) -> dict[str, Any]:
    """Where it is from, and the trajectories of these updates as sao.v1.TrainedTrajectory in proto JSON.

    sao.archive.NotArchivedError for an update that the run has not made.
    """
    settings = tomllib.loads((run / "run.toml").read_text(encoding="utf-8"))
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()  # noqa: S607
    archive = Archive(run / "archive")
    return {
        "source": {"algorithm": settings["trainer"]["algorithm"], "updates": list(updates), "commit": commit},
        "trajectories": [_entry(one) for update in updates for one in archive.read(update).trajectories],
    }


def _entry(trained: pb.TrainedTrajectory) -> dict[str, Any]:
    """Without what only says where it was sampled, and with its reward also where that is 0."""
    entry = {"reward": trained.reward} | MessageToDict(trained, preserving_proto_field_name=True)
    entry["trajectory"] = {key: value for key, value in entry["trajectory"].items() if key not in _OF_NO_INTEREST}
    return entry


def written(document: dict[str, Any]) -> str:
    """JSON that keeps lists of numbers, and objects without lists, on one line."""
    text = json.dumps(document, indent=1)
    for flat in (r"\[[^\[\]{}]*\]", r"\{[^\[\]{}]*\}"):
        text = re.sub(flat, lambda match: " ".join(match[0].split()), text)
    return text + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("updates", type=int, nargs="+")
    asked = parser.parse_args()
    sys.stdout.write(written(recording(asked.run, asked.updates)))
