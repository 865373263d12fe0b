"""SGLang platform plugin: an unmodified SGLang 0.5.23 wheel serves on a CPU in pure torch.

SGLang finds `activate` through the entry point group `sglang.srt.platforms`; the variable
`SGLANG_PLATFORM=cpuref` selects it. Everything here waits to be called: importing this package imports no SGLang.
"""

from __future__ import annotations


def activate() -> str:
    """Make the attention backend `torch_native` eligible for seeded sampling; the dotted name of the platform class."""
    from sglang.srt.arg_groups import choices

    if "torch_native" not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        choices.add_deterministic_attention_backend_choices(["torch_native"])
    return "sglang_cpuref.platform.CpuRefPlatform"
