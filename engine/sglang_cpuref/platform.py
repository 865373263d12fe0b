"""The CPU platform: SGLang's own CPU device, with what it would ask of `sgl_kernel` or CUDA replaced.

The three replacements serve routed experts (a pinned host buffer) and seeded sampling (batch-invariant
matmuls, the sampling hash); plain generation uses none of them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_cpuref.murmur import murmur_hash32

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class CpuRefPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # SGLang ships no types
    """Pure-torch CPU: no Triton, no graphs."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def init_backend(self) -> None:
        """Replace the three functions that have no CPU form in the wheel."""
        import sglang.kernels.ops.sampling.murmur_hash as hash_module
        from sglang.srt import batch_invariant_ops
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        ALLOC_MEMORY_FUNCS["cpu"] = _plain_host_memory
        # Only the sampling side of deterministic inference is wanted: the matmuls that this patches are CUDA's.
        batch_invariant_ops.enable_batch_invariant_mode = _nothing
        hash_module.murmur_hash32 = murmur_hash32
        # The sampler imports the name itself; when it came first, its copy has to be replaced too.
        sampler = sys.modules.get("sglang.srt.layers.sampler")
        if sampler is not None:
            vars(sampler)["murmur_hash32"] = murmur_hash32


def _nothing(*_args: object, **_kwargs: object) -> None:
    return None


def _plain_host_memory(  # noqa: PLR0917  # SGLang's signature
    dims: Sequence[int],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,  # noqa: ARG001
    allocator: object,  # noqa: ARG001
    registration_granularity_bytes: int | None = None,  # noqa: ARG001
) -> torch.Tensor:
    import torch

    return torch.empty(tuple(dims), dtype=dtype, device=device)
