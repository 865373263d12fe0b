"""What a version must satisfy before any engine hears of it.

A real server answers 200 to a checkpoint with unknown or missing tensors and then serves a mixture, and it dies of
a wrong shape or an id outside the vocabulary. So all that is checked here, from manifest, headers and bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sao.weights.base import IncompleteVersionError, VersionStore
from sao.weights.checkpoint import CheckpointFormatError, tensor_slots, weight_files
from sao.weights.manifest import Manifest
from services.weights.readings import Readings

Layout = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype by tensor name."""

_FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


class RefusedVersionError(Exception):
    """Something forbids that an engine loads this version; `reason` is one word for the metric."""

    def __init__(self, version: str, reason: str, detail: str) -> None:
        super().__init__(f"version {version} refused ({reason}): {detail}")
        self.version = version
        self.reason = reason


def manifest_layout(manifest: Manifest) -> Layout:
    """The layout a manifest promises."""
    return {tensor.name: (tuple(tensor.shape), tensor.dtype) for tensor in manifest.tensors}


def directory_layout(directory: Path) -> Layout:
    """The layout of a checkpoint directory's safetensors files; CheckpointFormatError when a name is there twice."""
    layout: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in weight_files(directory):
        for slot in tensor_slots(file):
            if slot.name in layout:
                msg = f"{file}: tensor {slot.name} is in an earlier file too"
                raise CheckpointFormatError(msg)
            layout[slot.name] = (slot.shape, slot.dtype)
    return layout


def layout_difference(found: Layout, expected: Layout, *, dtypes: bool = True) -> str | None:
    """The first difference in words, or None."""
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unknown:
        parts = [
            f"{len(names)} {what} ({names[0]})" for what, names in (("missing", missing), ("unknown", unknown)) if names
        ]
        return f"{' and '.join(parts)} of {len(expected)} tensors"
    for name, (shape, dtype) in sorted(found.items()):
        if shape != expected[name][0]:
            return f"{name} has shape {list(shape)}, expected {list(expected[name][0])}"
        if dtypes and dtype != expected[name][1]:
            return f"{name} has dtype {dtype}, expected {expected[name][1]}"
    return None


def inspect(store: VersionStore, version: str, reference: Layout | None, readings: Readings) -> Manifest:
    """Check everything about one version; RefusedVersionError says what is wrong, OSError that it cannot be read now.

    `reference` is the layout of the run's first version, or of the checkpoint the engines were started from;
    `readings` have most of the files already.
    """
    directory = store.path(version)
    try:
        found = readings.verify(store, version)
        manifest = store.manifest(version)
    except IncompleteVersionError as error:
        raise RefusedVersionError(version, "files", str(error)) from error
    promised = manifest_layout(manifest)
    fused = next((name for name in promised if _FUSED.search(name)), None)
    if fused is not None:
        detail = f"{fused} is a fused name, which engines ignore in silence; write experts.N.gate_proj.weight and so on"
        raise RefusedVersionError(version, "layout", detail)
    if reference is not None and (difference := layout_difference(promised, reference, dtypes=False)):
        raise RefusedVersionError(version, "layout", f"not the tensors this run began with: {difference}")
    try:
        if difference := layout_difference(directory_layout(directory), promised):
            raise RefusedVersionError(version, "layout", f"files differ from the manifest: {difference}")
        if (bad := next((one.non_finite for one in found if one.non_finite is not None), None)) is not None:
            raise RefusedVersionError(version, "non_finite", f"{bad} holds NaN or infinity")
        _check_config(version, manifest, json.loads((directory / "config.json").read_bytes()))
    except (CheckpointFormatError, FileNotFoundError, json.JSONDecodeError) as error:
        raise RefusedVersionError(version, "files", str(error)) from error
    return manifest


def _check_config(version: str, manifest: Manifest, config: Mapping[str, Any]) -> None:
    names = {tensor.name for tensor in manifest.tensors}
    if config.get("tie_word_embeddings") and "lm_head.weight" not in names:
        detail = (
            "tie_word_embeddings is true and lm_head.weight is missing; SGLang's MoE models never tie: untie the head"
        )
        raise RefusedVersionError(version, "layout", detail)
    sizes = (section.get("vocab_size") for section in (config, config.get("text_config") or {}))
    vocabulary = next((size for size in sizes if isinstance(size, int)), None)
    largest = max(token for sequence in manifest.canary for token in sequence.token_ids)
    if vocabulary is not None and largest >= vocabulary:
        detail = f"canary token id {largest} is outside the vocabulary of {vocabulary}, which would kill the engine"
        raise RefusedVersionError(version, "canary", detail)
