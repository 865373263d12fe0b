"""Versions that must never reach an engine."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from sao.weights.checkpoint import FileReading
from sao.weights.manifest import Manifest
from sao.weights.memory import MemoryVersionStore
from services.weights.engines.memory import checkpoint_logprobs
from services.weights.preflight import Layout, RefusedVersionError, inspect, manifest_layout
from services.weights.readings import Readings
from tests.support.versions import floats, publish_checkpoint, write_safetensors, write_toy_checkpoint

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FINE = {EMBED: floats(1.0, 2.0), HEAD: floats(1.0, 2.0, 3.0)}


@pytest.fixture
def store() -> MemoryVersionStore:
    return MemoryVersionStore()


@pytest.fixture
def reference(store: MemoryVersionStore, tmp_path: Path) -> Layout:
    return manifest_layout(publish_checkpoint(store, write_toy_checkpoint(tmp_path / "first", 0), checkpoint_logprobs))


def _overwrite(tensors: dict[str, tuple[str, list[int], bytes]]) -> Callable[[Path], None]:
    return lambda folder: write_safetensors(folder / "model.safetensors", tensors)


def _config(**settings: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(settings))

    return write


FAULTS: list[tuple[str, Callable[[Path], None], str, str]] = [
    ("half", _overwrite({EMBED: FINE[EMBED]}), "layout", r"1 missing \(lm_head\.weight\)"),
    ("unknown", _overwrite({**FINE, "model.extra": floats(1.0)}), "layout", r"1 unknown \(model\.extra\)"),
    ("shape", _overwrite({**FINE, HEAD: floats(1.0)}), "layout", r"lm_head\.weight has shape \[1\], expected \[3\]"),
    (
        "fused",
        _overwrite({**FINE, "model.layers.0.mlp.experts.gate_up_proj": floats(1.0)}),
        "layout",
        "fused name",
    ),
    ("nan", _overwrite({**FINE, HEAD: floats(1.0, math.nan, 2.0)}), "non_finite", "lm_head"),
    ("inf", _overwrite({**FINE, EMBED: floats(-math.inf, 2.0)}), "non_finite", "embed_tokens"),
    ("twice", lambda folder: write_safetensors(folder / "z.safetensors", {HEAD: FINE[HEAD]}), "files", "earlier file"),
    ("vocabulary", _config(vocab_size=20), "canary", "token id 30"),
    ("text vocabulary", _config(text_config={"vocab_size": 20}), "canary", "token id 30"),
    ("config", lambda folder: (folder / "config.json").unlink(), "files", r"config\.json"),
]


@pytest.mark.parametrize(("change", "reason", "detail"), [fault[1:] for fault in FAULTS], ids=[f[0] for f in FAULTS])
def test_each_fault_is_refused_by_name(
    store: MemoryVersionStore,
    reference: Layout,
    tmp_path: Path,
    change: Callable[[Path], None],
    reason: str,
    detail: str,
) -> None:
    folder = write_toy_checkpoint(tmp_path / "bad", 1)
    change(folder)
    version = publish_checkpoint(store, folder, lambda _, ids: [-1.0] * (len(ids) - 1)).version
    with pytest.raises(RefusedVersionError, match=detail) as caught:
        inspect(store, version, reference, Readings())
    assert caught.value.reason == reason
    assert version in str(caught.value)


def test_a_tied_head_is_refused_even_in_the_first_version(store: MemoryVersionStore, tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "tied", 0)
    write_safetensors(folder / "model.safetensors", {EMBED: FINE[EMBED]})
    _config(vocab_size=32, tie_word_embeddings=True)(folder)
    version = publish_checkpoint(store, folder, checkpoint_logprobs).version
    with pytest.raises(RefusedVersionError, match="untie"):
        inspect(store, version, None, Readings())


def test_damaged_files_are_refused(store: MemoryVersionStore, reference: Layout, tmp_path: Path) -> None:
    version = publish_checkpoint(store, write_toy_checkpoint(tmp_path / "a", 1), checkpoint_logprobs).version
    file = store.path(version) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(RefusedVersionError, match="sha256"):
        inspect(store, version, reference, Readings())


def test_a_manifest_that_lies_about_its_files_is_refused(store: MemoryVersionStore, tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "a", 1)
    honest = publish_checkpoint(store, folder, checkpoint_logprobs)
    version, directory = store.allocate()
    for file in folder.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    lying = honest.tensors[0].model_copy(update={"shape": [7]})
    manifest: Manifest = honest.model_copy(update={"version": version, "tensors": [lying, *honest.tensors[1:]]})
    store.commit(manifest, directory)
    with pytest.raises(RefusedVersionError, match="differ from the manifest"):
        inspect(store, version, None, Readings())


def test_a_good_version_passes(store: MemoryVersionStore, reference: Layout, tmp_path: Path) -> None:
    good = publish_checkpoint(store, write_toy_checkpoint(tmp_path / "b", 2), checkpoint_logprobs)
    assert inspect(store, good.version, reference, Readings()) == good


def test_a_disk_that_does_not_answer_condemns_no_version(
    store: MemoryVersionStore, reference: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is for ever, and the version is whole."""
    manifest = publish_checkpoint(store, write_toy_checkpoint(tmp_path / "next", 1), checkpoint_logprobs)

    def broken(file: Path) -> FileReading:
        raise OSError(errno.EIO, "Input/output error", str(file))

    with monkeypatch.context() as patch:
        patch.setattr("services.weights.readings.read_file", broken)
        with pytest.raises(OSError, match="Input/output error"):
            inspect(store, manifest.version, reference, Readings())
    assert inspect(store, manifest.version, reference, Readings()) == manifest
