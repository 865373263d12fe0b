"""How many parameters a model has, read without loading it (and without torch)."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from sao.config.schema import ModelSection

TINY_VOCABULARY = 128
"""Rows assumed for the tiny model's embedding; the task's vocabulary decides, and it is a small share either way."""
_HEADER_LIMIT = 100 * 2**20
"""Longest header that the safetensors format allows."""


def parameters(model: ModelSection) -> int | None:
    """Parameters of the policy; None when model.path holds no readable safetensors files."""
    return tiny_parameters(model) if model.path is None else checkpoint_parameters(model.path.expanduser())


def tiny_parameters(model: ModelSection) -> int:
    """Parameters of the tiny Qwen3-MoE: 4 heads, 2 key-value heads, expert width = hidden size, untied head."""
    hidden, head_dim = model.hidden_size, max(16, model.hidden_size // 4)
    attention = 2 * hidden * 4 * head_dim + 2 * hidden * 2 * head_dim + 2 * head_dim
    moe = model.experts * (3 * hidden * hidden + hidden)
    return 2 * TINY_VOCABULARY * hidden + model.layers * (attention + moe + 2 * hidden) + hidden


def checkpoint_parameters(directory: Path) -> int | None:
    """Parameters in a Hugging Face checkpoint, from the headers of its safetensors files."""
    try:
        counts = [_in_file(path) for path in sorted(directory.glob("*.safetensors"))]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error):
        return None
    return sum(counts) if counts else None


def cache_values_per_token(directory: Path) -> int | None:
    """Numbers that an engine caches for one token, from the checkpoint's config.json; None when it doesn't say."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        heads = int(found["num_attention_heads"])
        head_size = int(found.get("head_dim") or found["hidden_size"] // heads)
        return 2 * int(found["num_hidden_layers"]) * int(found.get("num_key_value_heads", heads)) * head_size
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _in_file(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _HEADER_LIMIT:
            msg = f"{path}: a header of {length} bytes is no safetensors header"
            raise ValueError(msg)
        text = file.read(length)
    if len(text) < length:
        msg = f"{path}: the file ends inside its header"
        raise ValueError(msg)
    header = json.loads(text)
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
