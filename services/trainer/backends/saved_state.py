"""A backend's state as files: safetensors for every tensor, JSON for every number, no pickle.

    backend.json                    format, ranks, optimiser steps
    <role>.safetensors              weights in the precision they are stepped in, frozen ones included
    <role>-optimizer.safetensors    <moment>/<parameter>
    random-<rank>.safetensors       torch's random state of each rank

Weights and moments are whole tensors by name, so the ZeRO stage may differ between `save` and `load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.trainer.backends.base import BackendError
from services.trainer.backends.role import MOMENTS, RoleState

Shapes = Mapping[str, tuple[torch.Size, bool]]


class _Meta(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = 1
    world_size: int
    steps: dict[str, int]


def write_backend_state(directory: Path, roles: Mapping[str, RoleState], rank: int, world_size: int) -> None:
    """Write the files; every rank its random state, rank 0 the rest. Making them durable is the caller's work."""
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random["cuda"] = torch.cuda.get_rng_state()
    _save(random, directory / f"random-{rank:04d}.safetensors")
    if rank != 0:
        return
    for role, state in roles.items():
        _save(dict(state.weights), directory / f"{role}.safetensors")
        moments = {f"{key}/{name}": tensor for key in MOMENTS for name, tensor in state.moments[key].items()}
        _save(moments, directory / f"{role}-optimizer.safetensors")
    meta = _Meta(world_size=world_size, steps={role: state.step for role, state in roles.items()})
    (directory / "backend.json").write_text(meta.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_backend_state(
    directory: Path, shapes: Mapping[str, Shapes], rank: int, world_size: int
) -> dict[str, RoleState]:
    """The state of every role, checked against the parameters that `shapes` names; sets torch's random state."""
    try:
        meta = _Meta.model_validate_json((directory / "backend.json").read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        msg = f"{directory}: no readable backend.json ({error})"
        raise BackendError(msg) from error
    if meta.format != 1 or set(meta.steps) != set(shapes):
        msg = f"{directory}: format {meta.format}, roles {sorted(meta.steps)}; expected 1 and {sorted(shapes)}"
        raise BackendError(msg)

    states = {}
    for role, expected in shapes.items():
        trained = {name: shape for name, (shape, trains) in expected.items() if trains}
        weights = _load(directory / f"{role}.safetensors", {name: shape for name, (shape, _) in expected.items()})
        flat = _load(
            directory / f"{role}-optimizer.safetensors",
            {f"{key}/{name}": shape for key in MOMENTS for name, shape in trained.items()},
        )
        moments = {key: {name: flat[f"{key}/{name}"] for name in trained} for key in MOMENTS}
        states[role] = RoleState(weights, moments, meta.steps[role])

    if world_size == meta.world_size:
        random = _load(directory / f"random-{rank:04d}.safetensors", None)
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and torch.cuda.is_available():
            torch.cuda.set_rng_state(random["cuda"])
    return states


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _load(path: Path, expected: Mapping[str, torch.Size] | None) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        msg = f"{path}: not a readable safetensors file ({error})"
        raise BackendError(msg) from error
    if expected is not None:
        for name in sorted(set(tensors) ^ set(expected)):
            msg = f"{path}: tensor {name} is {'unexpected' if name in tensors else 'missing'}; is it another model's?"
            raise BackendError(msg)
        for name, shape in expected.items():
            if tensors[name].shape != shape:
                msg = f"{path}: tensor {name} has shape {list(tensors[name].shape)}, expected {list(shape)}"
                raise BackendError(msg)
    return tensors
