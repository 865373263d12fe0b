"""Versions for tests: small files or copied checkpoints, described by a manifest, published as a trainer would."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sao.board.base import Board, TrainerFacts, TrainerState, VersionRecord
from sao.weights.base import VersionStore
from sao.weights.checkpoint import describe_files, describe_tensors
from sao.weights.manifest import CanarySequence, Manifest


def write_safetensors(file: Path, tensors: Mapping[str, tuple[str, list[int], bytes]]) -> None:
    """Write name -> (dtype code, shape, bytes) in the safetensors layout."""
    header: dict[str, object] = {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(data for _, _, data in tensors.values()))


def floats(*values: float) -> tuple[str, list[int], bytes]:
    return "F32", [len(values)], struct.pack(f"<{len(values)}f", *values)


def manifest_for(
    version: str, directory: Path, *, update: int = 0, parent: str | None = None, epoch: int = 1
) -> Manifest:
    return Manifest(
        run="test",
        version=version,
        update=update,
        parent=parent,
        trainer_epoch=epoch,
        created_s=0.0,
        dtype="float32",
        tensors=describe_tensors(directory),
        files=describe_files(directory),
        canary=[CanarySequence(token_ids=[1, 2, 3], logprobs=[-1.0, -2.0])],
    )


def publish(store: VersionStore, value: float = 0.0, *, epoch: int = 1) -> str:
    """Allocate, write one tensor, commit; the version's name."""
    version, directory = store.allocate()
    write_safetensors(directory / "model.safetensors", {"w": floats(value, 1.0)})
    (directory / "config.json").write_text("{}")
    store.commit(manifest_for(version, directory, epoch=epoch), directory)
    return version


def write_toy_checkpoint(directory: Path, seed: int, *, vocab_size: int = 32) -> Path:
    """A checkpoint of two small tensors that the in-memory engine can hold; another seed is another policy."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {"model.embed_tokens.weight": floats(seed + 0.5, 1.0), "lm_head.weight": floats(seed - 0.5, 2.0, 3.0)}
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "tie_word_embeddings": False}))
    return directory


CANARY = [[1, 5, 9, 7, 3, 8], [1, 6, 2, 2, 4, 30]]
Oracle = Callable[[Path, Sequence[int]], list[float]]


def publish_checkpoint(
    store: VersionStore, source: Path, oracle: Oracle, *, update: int = 0, canary: Sequence[Sequence[int]] = CANARY
) -> Manifest:
    """Commit a copy of a checkpoint directory as a new version, with the oracle's log-probs as its canary."""
    version, directory = store.allocate()
    for file in sorted(source.iterdir()):
        shutil.copy(file, directory)
    manifest = manifest_for(version, directory, update=update).model_copy(
        update={"canary": [CanarySequence(token_ids=list(ids), logprobs=oracle(source, ids)) for ids in canary]}
    )
    store.commit(manifest, directory)
    return manifest


async def announce(board: Board, manifest: Manifest) -> None:
    """What the trainer does after a commit: the record first, then its own facts."""
    epoch = manifest.trainer_epoch
    record = VersionRecord(name=manifest.version, update=manifest.update, parent=manifest.parent, epoch=epoch)
    await board.announce_version(record)
    facts = TrainerFacts(
        epoch=epoch, update=manifest.update, version=manifest.version, consumed=0, state=TrainerState.TRAINING
    )
    await board.write_trainer(facts)
