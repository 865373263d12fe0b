"""SGLang's sampling hash on a CPU: MurmurHash3 (x86, 32 bit) over (seed, position, column).

Source: `sglang/kernels/ops/sampling/murmur_hash.py` (the Triton kernel). It agrees with the published definition of
MurmurHash3 (tests); it was not compared with a GPU's output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

U32 = np.uint32


def murmur3_rows(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[U32], columns: npt.NDArray[U32]
) -> npt.NDArray[U32]:
    """Hash seeds and positions of shape (N,) with columns (M,): 16 little-endian bytes each; shape (N, M)."""
    with np.errstate(over="ignore"):
        seed = seeds.reshape(-1, 1)
        low = (seed & np.uint64(0xFFFFFFFF)).astype(U32)
        high = (seed >> np.uint64(32)).astype(U32)
        h = _mix(_mix(_mix(np.zeros_like(low), low), high), positions.reshape(-1, 1))
        h = _mix(h, columns.reshape(1, -1)) ^ U32(16)
        h = (h ^ (h >> U32(16))) * U32(0x85EBCA6B)
        h = (h ^ (h >> U32(13))) * U32(0xC2B2AE35)
        return h ^ (h >> U32(16))


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """SGLang's `murmur_hash32` for CPU tensors: seed and positions of shape (N,), columns (M,); uint32 of (N, M)."""
    import torch

    if seed.shape != positions.shape or seed.dim() != 1 or col_indices.dim() != 1:
        found = f"{tuple(seed.shape)}, {tuple(positions.shape)}, {tuple(col_indices.shape)}"
        msg = f"expected seed (N,), positions (N,), columns (M,); found {found}"
        raise ValueError(msg)
    hashed = murmur3_rows(
        seed.view(torch.int64).numpy().view(np.uint64),
        positions.to(torch.int64).numpy().astype(U32),
        col_indices.numpy().astype(U32),
    )
    return torch.from_numpy(hashed)


def _rotated(x: npt.NDArray[U32], by: int) -> npt.NDArray[U32]:
    return (x << U32(by)) | (x >> U32(32 - by))


def _mix(h: npt.NDArray[U32], block: npt.NDArray[U32]) -> npt.NDArray[U32]:
    scrambled = _rotated(block * U32(0xCC9E2D51), 15) * U32(0x1B873593)
    return _rotated(h ^ scrambled, 13) * U32(5) + U32(0xE6546B64)
