"""Publish a policy as a new weight version: a Hugging Face checkpoint, its manifest, its canary, its announcement.

Order: finite? -> files -> manifest -> commit (visible to readers) -> announce on the board. Nothing loads a
version before the board knows it, so a trajectory that names it is never unknown. What ends before that is rolled
back at the next start.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sao.atomic import append_line
from sao.board.base import Board, VersionRecord
from sao.telemetry.logs import get_logger
from sao.weights.base import VersionStore
from sao.weights.checkpoint import describe_files, describe_tensors
from sao.weights.manifest import CanarySequence, Manifest
from services.trainer.checkpoint_names import to_checkpoint
from services.trainer.outage import ride_out

log = get_logger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MAX_SHARD_BYTES = 4 << 30

Logprobs = Callable[[Sequence[Sequence[int]]], list[list[float]]]
"""Log-prob of ids[i+1] given ids[:i+1] for each sequence, float32, by the weights that are being published."""


class NonFiniteWeightsError(ArithmeticError):
    """A tensor holds NaN or infinity; the version was not published."""


@dataclass(frozen=True)
class Publisher:
    """Publishes the versions of one trainer process (one epoch)."""

    store: VersionStore
    board: Board
    run: str
    epoch: int
    initial: Path
    """Checkpoint directory of the initial policy: its config and tokenizer travel with every version."""
    canary: list[list[int]]
    keep_versions: int
    announced: Path
    """Every version announced, a line each: what a board that is lost gets back, collected ones included."""

    async def publish(
        self,
        state: Mapping[str, Tensor],
        logprobs: Logprobs,
        *,
        update: int,
        parent: str | None,
        preference: int = 0,
    ) -> VersionRecord:
        """Write, commit and announce `state` (parameter names of the module) as a new version.

        `preference`: the newest version of it that an update in this state was trained under; 0: not known.

        Raises NonFiniteWeightsError before anything is visible, NoSpaceError from the store, FencedError or
        StaleWriterError when a newer trainer runs.
        """
        tensors = untied(to_checkpoint(state))
        _require_finite(tensors, update)
        canary = [
            CanarySequence(token_ids=ids, logprobs=values)
            for ids, values in zip(self.canary, logprobs(self.canary), strict=True)
        ]
        name, directory = self.store.allocate()
        write_checkpoint(directory, tensors, self.initial)
        manifest = Manifest(
            run=self.run,
            version=name,
            update=update,
            parent=parent,
            trainer_epoch=self.epoch,
            created_s=time.time(),
            preference=preference,
            dtype=str(next(iter(tensors.values())).dtype).removeprefix("torch."),
            tensors=describe_tensors(directory),
            files=describe_files(directory),
            canary=canary,
        )
        self.store.commit(manifest, directory)
        record = VersionRecord(name=name, update=update, parent=parent, epoch=self.epoch)
        await ride_out(lambda: self.board.announce_version(record))
        append_line(self.announced, record.model_dump_json().encode())
        removed = self.store.collect(self.keep_versions)
        log.info("version published", version=name, update=update, parent=parent, collected=removed)
        return record


async def roll_back(board: Board, store: VersionStore) -> None:
    """Remove what earlier trainers, fenced by now, have begun to publish and not announced: no reader knows it."""
    announced = await ride_out(board.versions)
    if removed := store.roll_back(announced):
        log.warning("rolled back an interrupted publication", versions=removed, announced=max(announced, default=""))


def untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with a head of their own: SGLang's MoE models never tie theirs, and say nothing."""
    if HEAD in tensors:
        return dict(tensors)
    if EMBEDDING not in tensors:
        msg = f"the policy has neither {HEAD} nor {EMBEDDING}: not a causal language model that an engine serves"
        raise ValueError(msg)
    return {**tensors, HEAD: tensors[EMBEDDING].clone()}


def write_checkpoint(directory: Path, tensors: Mapping[str, Tensor], initial: Path) -> None:
    """A checkpoint that AutoModelForCausalLM and SGLang load; `tensors` by their on-disk names."""
    config = json.loads((initial / "config.json").read_bytes())
    (directory / "config.json").write_text(json.dumps(_served_config(config, tensors), indent=2))
    for name in TOKENIZER_FILES:
        if (initial / name).exists():
            shutil.copyfile(initial / name, directory / name)
    shards = _shards(tensors, MAX_SHARD_BYTES)
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _served_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Untied, and the expert count under both of its names (transformers 5 writes one, others read the other)."""
    served = {**config, "tie_word_embeddings": False}
    experts = config.get("num_local_experts", config.get("num_experts"))
    if experts is not None:
        served |= {"num_experts": experts, "num_local_experts": experts}
    dtype = str(tensors[HEAD].dtype).removeprefix("torch.")
    return served | {"dtype": dtype, "torch_dtype": dtype}


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in sorted(tensors.items()):
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _require_finite(tensors: Mapping[str, Tensor], update: int) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            msg = f"update {update}: {name} holds non-finite values; not published, engines keep the last good version"
            raise NonFiniteWeightsError(msg)
