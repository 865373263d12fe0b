"""Reading checkpoint directories without torch."""

from __future__ import annotations

import hashlib
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.weights.checkpoint import (
    CheckpointFormatError,
    FileReading,
    describe_files,
    describe_tensors,
    first_non_finite,
    read_file,
    sha256_of,
    tensor_slots,
    zero_tensors,
)
from sao.weights.manifest import CanarySequence
from tests.support.versions import floats, write_safetensors


def test_slots_and_checksums_agree_with_the_safetensors_library(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = {slot.name: slot for slot in tensor_slots(tmp_path / "model.safetensors")}
    assert {name: (slot.shape, slot.dtype) for name, slot in found.items()} == {
        "a": ((4,), "bfloat16"),
        "b": ((2, 3), "float32"),
    }
    file = tmp_path / "model.safetensors"
    slot = found["b"]
    assert file.read_bytes()[slot.start : slot.start + slot.size] == tensors["b"].numpy().tobytes()
    digest = next(entry.sha256 for entry in describe_tensors(tmp_path) if entry.name == "b")
    assert digest == sha256_of(file, slot.start, slot.size)


def test_files_are_described_but_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x").write_bytes(b"abc")
    assert [(entry.name, entry.size) for entry in describe_files(tmp_path)] == [("sub/x", 3)]


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, struct.pack("<Q", 1 << 40) + b"{}"])
def test_a_broken_header_is_named(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    with pytest.raises(CheckpointFormatError, match=r"model\.safetensors"):
        tensor_slots(file)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"w": floats(1.0, 2.0)})
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointFormatError, match="tensor w"):
        tensor_slots(file)


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_non_finite_float32_is_found_exactly(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    folder = tmp_path_factory.mktemp("finite")
    write_safetensors(folder / "m.safetensors", {"fine": floats(0.0), "w": floats(*values)})
    expected = None if all(math.isfinite(value) for value in values) else "w"
    assert first_non_finite(folder) == expected


@given(
    tensors=st.lists(st.lists(st.floats(width=32), max_size=9), max_size=4),
    chunk=st.sampled_from([8, 16]),
    tail=st.binary(max_size=20),
)
def test_one_pass_finds_checksum_and_values_wherever_a_chunk_ends(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[list[float]], chunk: int, tail: bytes
) -> None:
    file = tmp_path_factory.mktemp("pass") / "m.safetensors"
    write_safetensors(file, {f"w{at}": floats(*values) for at, values in enumerate(tensors)})
    file.write_bytes(file.read_bytes() + tail)
    bad = [f"w{at}" for at, values in enumerate(tensors) if not all(map(math.isfinite, values))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sao.weights.checkpoint._CHUNK", chunk)
        found = read_file(file)
    assert found == FileReading(hashlib.sha256(file.read_bytes()).hexdigest(), bad[0] if bad else None)


def test_a_file_that_is_no_checkpoint_is_read_all_the_same(tmp_path: Path) -> None:
    for name in ("config.json", "broken.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
        assert read_file(tmp_path / name) == FileReading(hashlib.sha256(b"{}").hexdigest(), None)


def test_tensors_that_share_bytes_are_named(tmp_path: Path) -> None:
    header = (
        b'{"a":{"shape":[2],"dtype":"F32","data_offsets":[0,8]},"b":{"shape":[1],"dtype":"F32","data_offsets":[4,8]}}'
    )
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(CheckpointFormatError, match=r"tensor b begins at byte .*, inside a"):
        tensor_slots(file)


@given(bits=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=20), half=st.booleans())
def test_non_finite_16_bit_floats_are_found_exactly(
    tmp_path_factory: pytest.TempPathFactory, bits: list[int], half: bool
) -> None:
    folder = tmp_path_factory.mktemp("finite16")
    data = struct.pack(f"<{len(bits)}H", *bits)
    write_safetensors(folder / "m.safetensors", {"w": ("F16" if half else "BF16", [len(bits)], data)})
    exponent = 0x7C00 if half else 0x7F80
    expected = "w" if any(value & exponent == exponent for value in bits) else None
    assert first_non_finite(folder) == expected


@pytest.mark.parametrize("logprobs", [[math.nan, -1.0], [-math.inf, -1.0], [-1.0], [-1.0, -1.0, -1.0]])
def test_a_canary_that_proves_nothing_is_refused(logprobs: list[float]) -> None:
    with pytest.raises(ValueError, match=r"logprobs|log-probs"):
        CanarySequence(token_ids=[1, 2, 3], logprobs=logprobs)


@pytest.mark.parametrize(
    "header", [b"{", b"[]", b'{"w": {}}', b'{"w": {"shape": [1], "dtype": "F32", "data_offsets": [0]}}']
)
def test_a_header_that_is_none_is_a_broken_file(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointFormatError, match=r"model\.safetensors"):
        tensor_slots(file)


def test_tensors_of_nothing_but_zeros_are_named_whatever_their_sign_and_place(tmp_path: Path) -> None:
    late = floats(*[0.0] * 5000, 1.0)
    tensors = {"zeros": floats(0.0, -0.0), "long": floats(*[0.0] * 5000), "late": late, "w": floats(1.0, 0.0)}
    write_safetensors(tmp_path / "a.safetensors", tensors)
    write_safetensors(tmp_path / "b.safetensors", {"empty": floats(), "half": ("BF16", [2], b"\x00\x80\x00\x00")})
    assert zero_tensors(tmp_path) == ["zeros", "long", "half"]
