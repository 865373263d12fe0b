"""What lies in a checkpoint directory, read without torch: files, safetensors headers, checksums, non-finite values.

The safetensors layout: 8 bytes little-endian header length, a JSON header, then the tensors' bytes
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sao.weights.manifest import FileEntry, TensorEntry

MANIFEST_FILE = "manifest.json"
_CHUNK = 8 << 20
_FIRST_BLOCK = 4096
_MAX_HEADER = 100 << 20
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class CheckpointFormatError(ValueError):
    """A file is not what its name says; names the file and what is wrong."""


@dataclass(frozen=True)
class TensorSlot:
    """One tensor's place in a safetensors file; `start` and `size` in bytes from the file's beginning."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    size: int


def tensor_slots(file: Path) -> list[TensorSlot]:
    """The tensors of one safetensors file in file order; CheckpointFormatError when the header is broken."""
    total = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < length <= min(_MAX_HEADER, total - 8):
            msg = f"{file}: no safetensors header (length {length} in a file of {total} bytes)"
            raise CheckpointFormatError(msg)
        text = stream.read(length)
    base = 8 + length
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        slots = [
            TensorSlot(
                name=name,
                shape=tuple(entry["shape"]),
                dtype=_DTYPES.get(entry["dtype"], entry["dtype"]),
                start=base + entry["data_offsets"][0],
                size=entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
        ]
    except (ValueError, AttributeError, IndexError, KeyError, TypeError) as error:
        msg = f"{file}: the safetensors header is broken: {type(error).__name__}: {error}"
        raise CheckpointFormatError(msg) from error
    slots.sort(key=lambda slot: slot.start)
    for before, slot in pairwise(slots):
        if slot.start < before.start + before.size:
            msg = f"{file}: tensor {slot.name} begins at byte {slot.start}, inside {before.name}"
            raise CheckpointFormatError(msg)
    if slots and slots[-1].start + slots[-1].size > total:
        msg = f"{file}: tensor {slots[-1].name} ends at byte {slots[-1].start + slots[-1].size} of {total}"
        raise CheckpointFormatError(msg)
    return slots


def _chunks(file: Path, start: int, size: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        stream.seek(start)
        while size > 0:
            chunk = stream.read(min(_CHUNK, size))
            if not chunk:
                return
            size -= len(chunk)
            yield chunk


def sha256_of(file: Path, start: int = 0, size: int | None = None) -> str:
    """Hex SHA-256 of a file, or of `size` bytes of it from `start`."""
    digest = hashlib.sha256()
    for chunk in _chunks(file, start, file.stat().st_size - start if size is None else size):
        digest.update(chunk)
    return digest.hexdigest()


def weight_files(directory: Path) -> list[Path]:
    """The files an engine loads from a checkpoint directory."""
    return sorted(directory.glob("*.safetensors"))


def describe_files(directory: Path) -> list[FileEntry]:
    """Every file under the directory but the manifest, by its path in it."""
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return [
        FileEntry(name=name, size=file.stat().st_size, sha256=sha256_of(file))
        for file in files
        if (name := file.relative_to(directory).as_posix()) != MANIFEST_FILE
    ]


def describe_tensors(directory: Path) -> list[TensorEntry]:
    """Every tensor of the directory's safetensors files, with the checksum of its bytes."""
    return [
        TensorEntry(
            name=slot.name, shape=list(slot.shape), dtype=slot.dtype, sha256=sha256_of(file, slot.start, slot.size)
        )
        for file in weight_files(directory)
        for slot in tensor_slots(file)
    ]


def _chunk_is_finite(chunk: bytes, dtype: str) -> bool:
    """Whether no element's exponent is all ones (little-endian IEEE; a strided slice and `in` run at C speed)."""
    if dtype in {"float32", "bfloat16"}:
        width = 4 if dtype == "float32" else 2
        high = chunk[width - 1 :: width]
        if b"\x7f" not in high and b"\xff" not in high:
            return True
        below = chunk[width - 2 :: width]
        return not any(top & 0x7F == 0x7F and low & 0x80 for top, low in zip(high, below, strict=True))
    if dtype == "float16":
        high = chunk[1::2]
        return not any(bytes([top]) in high for top in (*range(0x7C, 0x80), *range(0xFC, 0x100)))
    return True


@dataclass(frozen=True)
class FileReading:
    """What one pass over a file has found."""

    sha256: str
    non_finite: str | None
    """Name of a tensor in it that holds a NaN or an infinity; looks at float32, bfloat16 and float16."""


def read_file(file: Path) -> FileReading:
    """Read a file once, for its checksum and for tensors that are not finite.

    The values of a *.safetensors file with a broken header can't be looked at; `tensor_slots` says what is broken.
    Not memory-mapped: a file that somebody cuts short meanwhile would end the process.
    """
    digest, bad = hashlib.sha256(), None
    # SHA-256 lets other threads run: with a core to spare, reading on and looking at values takes no time of its own.
    with ThreadPoolExecutor(max_workers=1) as beside:
        hashing = beside.submit(digest.update, b"")
        for slot, chunk in _parts(file):
            hashing.result()  # no more than two chunks in memory
            hashing = beside.submit(digest.update, chunk)
            if slot is not None and bad is None and not _chunk_is_finite(chunk, slot.dtype):
                bad = slot.name
    return FileReading(digest.hexdigest(), bad)


def _parts(file: Path) -> Iterator[tuple[TensorSlot | None, bytes]]:
    """All of a file in chunks, each with the tensor it is of; None for what is of no tensor."""
    at, slots = 0, []
    if file.suffix == ".safetensors":
        with suppress(CheckpointFormatError):
            slots = [slot for slot in tensor_slots(file) if slot.size > 0]
    for slot in slots:
        for chunk in _chunks(file, at, slot.start - at):
            yield None, chunk
        for chunk in _chunks(file, slot.start, slot.size):
            yield slot, chunk
        at = slot.start + slot.size
    for chunk in _chunks(file, at, file.stat().st_size - at):
        yield None, chunk


def first_non_finite(directory: Path) -> str | None:
    """Name of a tensor that holds a NaN or an infinity, or None; looks at float32, bfloat16 and float16."""
    return next((bad for file in weight_files(directory) if (bad := read_file(file).non_finite) is not None), None)


def zero_tensors(directory: Path) -> list[str]:
    """Names of the tensors that hold nothing but zeros, of either sign; empty ones are not among them."""
    return [
        slot.name
        for file in weight_files(directory)
        for slot in tensor_slots(file)
        if slot.size and _is_zero(file, slot)
    ]


def _is_zero(file: Path, slot: TensorSlot) -> bool:
    """Almost always the first bytes tell. 0x80 is the sign of a zero, or at most 1e-5 in float16, 1e-38 in others."""
    with file.open("rb") as stream:
        stream.seek(slot.start)
        left = slot.size
        while left > 0:
            block = stream.read(min(_CHUNK if left < slot.size else _FIRST_BLOCK, left))
            if not block or block.strip(b"\x00\x80"):
                return False
            left -= len(block)
    return True
