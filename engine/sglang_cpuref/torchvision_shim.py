"""Let `import torchvision` succeed beside a CPU build of torch.

PyPI's torchvision links CUDA libraries. Beside a CPU torch its extension does not load, and the import dies in
`register_fake("torchvision::nms")` because the operator was never declared. Declaring the two schemas first is enough:
SGLang imports torchvision and calls none of it for a text model.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DeclareOperatorsFirst(importlib.abc.MetaPathFinder):
    """Steps in once, at the first import of torchvision, and steps aside."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _declare()
        return None


_library: list[object] = []  # a torch.library.Library undeclares its operators when it is collected


def _declare() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(name + NMS)  # type: ignore[no-untyped-call]
    _library.append(library)


def torch_cuda_version() -> str | None:
    """`torch.version.cuda` of the installed torch, read without importing it (seconds); None on a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        msg = "torch is not installed in this environment: run `make setup`"
        raise RuntimeError(msg)
    values: dict[str, object] = {}
    source = Path(spec.origin).with_name("version.py").read_text()
    exec(compile(source, "torch/version.py", "exec"), values)  # noqa: S102  # the installed torch's own constants
    cuda = values.get("cuda")
    return None if cuda is None else str(cuda)


def install_if_cpu() -> bool:
    """Install the shim when torch is a CPU build and torchvision is not imported yet; whether it did."""
    if torch_cuda_version() is not None or "torchvision" in sys.modules:
        return False
    if not any(isinstance(finder, _DeclareOperatorsFirst) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DeclareOperatorsFirst())
    return True
