"""Two data-parallel ranks, driven by rank 0 over gloo, learn what one rank learns, and skip what one of them must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import free_port


def run_ranks(world_size: int, checkpoint: Path, folder: Path, algorithm: str) -> dict[str, Any]:
    out = folder / f"ranks-{world_size}.json"
    port = str(free_port())
    processes = []
    for rank in range(world_size):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tests.support.trainer_rank", str(checkpoint), str(out), algorithm]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output.decode()[-3000:]
    finally:
        for process in processes:
            process.kill()
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.timeout(300)
@pytest.mark.parametrize("algorithm", ["sao", "grpo_async"])
def test_two_ranks_equal_one(tiny_checkpoints: tuple[Path, Path], tmp_path: Path, algorithm: str) -> None:
    one, two = (run_ranks(n, tiny_checkpoints[0], tmp_path, algorithm) for n in (1, 2))
    # Three trajectories on two ranks: the last micro-step holds a dummy, and the order is that of accumulation.
    assert len(two["advantages"]) == 6
    for ours, theirs in zip(two["advantages"], one["advantages"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    # The first update's, before any step: on other routes they would differ by about a tenth.
    for ours, theirs in zip(two["ratios"][:3], one["ratios"][:3], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert two["logprobs"][0] == pytest.approx(one["logprobs"][0], abs=1e-4)
    assert two["again"] == two["logprobs"]
    assert two["checksum"] == pytest.approx(one["checksum"], rel=1e-5)
    for found in (one, two):
        broken_loss, broken_gradient, whole = found["skipped"]
        assert broken_loss["reason"] == "loss of the first pass is not finite"
        assert broken_gradient["reason"] == "gradient of the policy is not finite"
        assert whole["reason"] == ""
        # The policy is what it was on every rank, and so is the critic: it values the same tokens the same.
        assert broken_loss["policy"] == broken_gradient["policy"] == found["checksum"] != whole["policy"]
        assert broken_loss["values"] == broken_gradient["values"] == whole["values"]
