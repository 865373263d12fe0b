"""The engine kit, as far as it can be seen without SGLang: the hash, the start line, the shim.

The kit is not installed beside `sao`; conftest.py puts its folder on the path.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_cpuref import serve, torchvision_shim
from sglang_cpuref.murmur import murmur3_rows, murmur_hash32

ROOT = Path(__file__).resolve().parents[3]
MASK = 0xFFFFFFFF


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, for lengths that are multiples of 4, from its published definition."""
    h = 0
    for start in range(0, len(data), 4):
        k = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & MASK
        k = (k << 15 | k >> 17) & MASK
        h ^= k * 0x1B873593 & MASK
        h = (h << 13 | h >> 19) & MASK
        h = (h * 5 + 0xE6546B64) & MASK
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def test_the_reference_agrees_with_published_values() -> None:
    assert murmur3(b"") == 0
    assert murmur3(b"test") == 0xBA6BD213
    assert murmur3(b"\0\0\0\0") == 0x2362F9DE


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=5),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=7),
)
def test_every_cell_is_the_hash_of_seed_position_and_column(rows: list[tuple[int, int]], columns: list[int]) -> None:
    seeds = np.array([seed for seed, _ in rows], np.uint64)
    positions = np.array([position for _, position in rows], np.uint32)

    hashed = murmur3_rows(seeds, positions, np.array(columns, np.uint32))

    assert hashed.dtype == np.uint32
    for i, (seed, position) in enumerate(rows):
        for j, column in enumerate(columns):
            data = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
            assert int(hashed[i, j]) == murmur3(data)


def test_the_torch_form_gives_the_same() -> None:
    import torch

    hashed = murmur_hash32(torch.tensor([7, -1]), torch.tensor([3, 4]), torch.arange(5))

    wanted = murmur3_rows(
        np.array([7, 2**64 - 1], np.uint64), np.array([3, 4], np.uint32), np.arange(5, dtype=np.uint32)
    )
    assert (hashed.numpy() == wanted).all()


def test_the_torch_form_refuses_other_shapes() -> None:
    import torch

    with pytest.raises(ValueError, match=r"expected seed \(N,\)"):
        murmur_hash32(torch.tensor([1, 2]), torch.tensor([1]), torch.arange(2))


def test_the_server_gets_what_a_rollout_needs() -> None:
    asked = serve.parser().parse_args(
        ["--model", "m", "--port", "31000", "--seed", "9", "--max-total-tokens", "77", "--", "--log-level", "debug"]
    )

    arguments = serve.server_arguments(asked)

    for flag in ("--sleep-on-idle", "--enable-cache-report", "--enable-metrics", "--skip-server-warmup"):
        assert flag in arguments
    for flag, value in (
        ("--random-seed", "9"),
        ("--dtype", "float32"),
        ("--max-total-tokens", "77"),
        ("--device", "cpu"),
    ):
        assert arguments[arguments.index(flag) + 1] == value
    assert arguments[-2:] == ["--log-level", "debug"]
    assert "--enable-return-routed-experts" not in arguments, "what asks for routes says so itself"
    assert "--api-key" not in arguments


def test_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAO_ENGINE_API_KEY", "for-data")
    monkeypatch.setenv("SAO_ENGINE_ADMIN_KEY", "for-control")

    arguments = serve.server_arguments(serve.parser().parse_args(["--model", "m", "--port", "1"]))

    assert arguments[arguments.index("--api-key") + 1] == "for-data"
    assert arguments[arguments.index("--admin-api-key") + 1] == "for-control"


def test_a_folder_without_a_checkpoint_is_refused_before_sglang_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        serve.main(["--model", str(tmp_path), "--port", "1"])

    assert caught.value.code == 2
    assert "there is no config.json" in capsys.readouterr().err


def test_the_build_of_torch_is_known_without_importing_it() -> None:
    program = (
        "import sys; from sglang_cpuref.torchvision_shim import torch_cuda_version;"
        "print(torch_cuda_version(), 'torch' in sys.modules)"
    )

    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT / "engine", capture_output=True, text=True, check=True
    )

    assert answer.stdout.split() == ["None", "False"]


def test_beside_a_torch_with_cuda_the_shim_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.meta_path)
    monkeypatch.setattr(torchvision_shim, "torch_cuda_version", lambda: "12.8")

    assert not torchvision_shim.install_if_cpu()
    assert sys.meta_path == before


def test_an_engine_without_a_seed_draws_one_at_each_start() -> None:
    asked = serve.parser().parse_args(["--model", "m", "--port", "1"])
    seeds = set()
    for _ in range(3):
        arguments = serve.server_arguments(asked)
        seeds.add(arguments[arguments.index("--random-seed") + 1])
    assert len(seeds) > 1, "replicas and restarts would sample alike"
