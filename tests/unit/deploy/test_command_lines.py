"""The command lines of other people's programs in the manifests, read by those programs' own parsers."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.engine import ENGINE_PYTHON
from tests.unit.deploy import files
from tools.manifests import compose
from tools.manifests.render import pods

KNOWN_TO_THE_GROUP = {"$(LWS_GROUP_SIZE)": "2", "$(LWS_WORKER_INDEX)": "1", "$(LWS_LEADER_ADDRESS)": "leader"}
"""What the controller of LeaderWorkerSets puts into the environment."""
PARSE = """
import argparse, json, os, sys
sys.path.insert(0, "engine")
os.environ["SGLANG_PLATFORM"] = "cpuref"
from sglang_cpuref import torchvision_shim
torchvision_shim.install_if_cpu()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
found = [parser.parse_args(line) for line in json.loads(sys.argv[1])]
print(json.dumps([[one.tp_size, one.nnodes, one.random_seed] for one in found]))
"""


def lines(container: str) -> list[list[str]]:
    """The arguments of every container of this name that does not run our own code, in the GPU overlays."""
    found = [
        list(one["args"])
        for overlay in ("gpu", "gpu-multi")
        for pod in pods(files.overlay(overlay))
        for one in pod.spec["containers"]
        if one["name"] == container and "command" in one
    ]
    return [[_filled(word) for word in line] for line in found]


def _filled(word: str) -> str:
    for name, value in KNOWN_TO_THE_GROUP.items():
        word = word.replace(name, value)
    return word


@pytest.mark.engine
def test_sglang_knows_every_flag() -> None:
    if not ENGINE_PYTHON.exists():
        pytest.skip("the engine environment is missing: run `make setup`")
    every = [*lines("engine"), compose.services()["engine"]["command"][3:]]
    done = subprocess.run(
        [str(ENGINE_PYTHON), "-c", PARSE, json.dumps(every)],
        cwd=files.ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # No seed: replicas and restarts would sample alike.
    assert json.loads(done.stdout.splitlines()[-1]) == [[1, 1, None], [8, 2, None], [8, 2, None], [1, 1, None]]


def test_torchrun_knows_every_flag() -> None:
    from torch.distributed.run import parse_args

    every = lines("trainer")
    assert len(every) == 2
    for line in every:
        found = parse_args(line)  # type: ignore[no-untyped-call]
        assert (found.nnodes, found.node_rank, found.master_addr) == ("2", 1, "leader")
        assert (found.training_script, found.module, found.max_restarts) == ("services.trainer", True, 0)
        ranks = files.run_config(files.overlay("gpu-multi")).trainer.ranks
        assert int(found.nproc_per_node) * int(found.nnodes) == ranks
        (grace,) = {
            pod.spec["terminationGracePeriodSeconds"]
            for pod in pods(files.overlay("gpu-multi"))
            if pod.name.startswith("trainer")
        }
        assert found.shutdown_timeout < grace
