"""Parameter names of the module in memory -> names of the checkpoint on disk, as SGLang and transformers read them.

transformers 5 keeps a layer's experts as two tensors, `gate_up_proj [E, 2I, H]` (gate rows first) and
`down_proj [E, H, I]`; checkpoints hold one matrix per expert and projection. The split is ours, so that it
costs no model object and no import; tests/unit/services/trainer/test_checkpoint_names.py holds it equal to
`save_pretrained`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

_FUSED = re.compile(r"^(?P<stem>.*\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)$")


class UnknownLayoutError(ValueError):
    """A fused expert tensor does not have the shape this split knows."""


def to_checkpoint(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor under its on-disk name, contiguous; views of the input where nothing had to be split.

    Raises UnknownLayoutError for a fused tensor that is not `[E, 2I, H]` / `[E, H, I]`, and ValueError when
    two inputs map to one name.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for out_name, out in _split(name, tensor):
            if out_name in result:
                msg = f"two tensors map to the checkpoint name {out_name!r}"
                raise ValueError(msg)
            result[out_name] = out.contiguous()
    return result


def _split(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    match = _FUSED.match(name)
    if match is None:
        return [(name, tensor)]
    if tensor.dim() != 3:
        msg = f"{name}: expected [experts, out, in], found shape {tuple(tensor.shape)}"
        raise UnknownLayoutError(msg)
    stem = match["stem"]
    if match["kind"] == "down_proj":
        return [(f"{stem}.{e}.down_proj.weight", matrix) for e, matrix in enumerate(tensor)]
    if tensor.shape[1] % 2:
        msg = f"{name}: expected an even number of gate+up rows, found shape {tuple(tensor.shape)}"
        raise UnknownLayoutError(msg)
    pairs: list[tuple[str, Tensor]] = []
    for e, matrix in enumerate(tensor):
        gate, up = matrix.chunk(2, dim=0)
        pairs += [(f"{stem}.{e}.gate_proj.weight", gate), (f"{stem}.{e}.up_proj.weight", up)]
    return pairs
