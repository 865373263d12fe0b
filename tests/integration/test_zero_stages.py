"""Every ZeRO stage, on one rank and on two, takes the same 20 updates as plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from services.trainer.backends.deepspeed import DeepSpeedBackend
from services.trainer.backends.torch_reference import TorchReferenceBackend
from tests.support.processes import free_port
from tests.support.zero_updates import norms, save_small_checkpoint, states, train, zero_config

UPDATES = 20
TOLERANCE = 1e-5
"""float32, while the weights move by up to 4e-2: AdamW divides rounding noise by its own size."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors after 20 updates in plain torch."""
    config = zero_config(0)
    backend = TorchReferenceBackend(config, checkpoint)
    stats = train(backend, config, range(UPDATES))
    return states(backend) | norms(stats)


@pytest.fixture(scope="module")
def initial(checkpoint: Path) -> dict[str, Tensor]:
    return states(TorchReferenceBackend(zero_config(0), checkpoint))


def assert_same_training(found: dict[str, Tensor], expected: dict[str, Tensor], initial: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    frozen = {name for name, tensor in initial.items() if torch.equal(tensor, expected[name])}
    assert any("self_attn" in name for name in frozen)
    assert {name for name, tensor in initial.items() if torch.equal(tensor, found[name])} == frozen
    for name, tensor in expected.items():
        bound = 1e-3 * float(tensor) if name.endswith("norm") and tensor.dim() == 0 else TOLERANCE
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=bound, msg=f"{name}: {found[name]} {tensor}")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_equals_plain_torch(
    stage: int, checkpoint: Path, expected: dict[str, Tensor], initial: dict[str, Tensor]
) -> None:
    config = zero_config(stage)
    backend = DeepSpeedBackend(config, checkpoint)
    try:
        stats = train(backend, config, range(UPDATES))
        assert_same_training(states(backend) | norms(stats), expected, initial)
    finally:
        backend.close()


@pytest.fixture
def two_ranks(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> dict[str, Tensor]:
    """The tensors after two processes trained at the stage given, saving and loading half-way."""
    out, port, processes = tmp_path / "out.safetensors", str(free_port()), []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        arguments = [str(checkpoint), str(request.param), str(UPDATES), str(out)]
        command = [sys.executable, "-m", "tests.support.zero_updates", *arguments]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        outputs = [process.communicate(timeout=150)[0].decode()[-3000:] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    tensors: dict[str, Tensor] = load_file(out)
    return tensors


@pytest.mark.timeout(200)
@pytest.mark.parametrize("two_ranks", [0, 2, 3], indirect=True)
def test_two_ranks_equal_plain_torch_on_one(
    two_ranks: dict[str, Tensor], expected: dict[str, Tensor], initial: dict[str, Tensor]
) -> None:
    assert_same_training(two_ranks, expected, initial)
