"""What is published is exactly what transformers would have saved, and carries its own proof."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sao.board.base import VersionRecord
from sao.board.memory import MemoryBoard
from sao.streams.base import StreamUnavailableError
from sao.tasks.calculator import Calculator
from sao.weights.filesystem import FileSystemVersionStore
from services.trainer import publisher as module
from services.trainer.canary import canary_sequences, sequences_for
from services.trainer.checkpoint_names import UnknownLayoutError, to_checkpoint
from services.trainer.publisher import NonFiniteWeightsError, Publisher, untied, write_checkpoint
from services.trainer.tiny_model import save_tokenizer
from services.weights.canary import CALIBRATION_TOKENS


def test_names_and_tensors_equal_what_transformers_saves(tiny_checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints[0])
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    ours = to_checkpoint(model.state_dict())
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in saved)


def test_a_published_checkpoint_loads_and_says_the_same(tiny_checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints[1]).eval()
    write_checkpoint(tmp_path, to_checkpoint(model.state_dict()), tiny_checkpoints[0])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[1, 5, 9, 4, 20, 11, 2]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_experts"], config["num_local_experts"], config["tie_word_embeddings"]) == (4, 4, False)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<eos>"


def test_a_large_checkpoint_is_written_in_shards(
    tiny_checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SHARD_BYTES", 100_000)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints[0])
    write_checkpoint(tmp_path, to_checkpoint(model.state_dict()), tiny_checkpoints[0])
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, ours), theirs in zip(loaded.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_tied_model_is_published_with_a_head_of_its_own() -> None:
    embedding = torch.arange(6.0).reshape(3, 2)
    tensors = untied({"model.embed_tokens.weight": embedding})
    assert torch.equal(tensors["lm_head.weight"], embedding)
    assert tensors["lm_head.weight"].data_ptr() != embedding.data_ptr()
    with pytest.raises(ValueError, match="not a causal language model"):
        untied({"score.weight": embedding})


@given(experts=st.integers(1, 5), inner=st.integers(1, 4), hidden=st.integers(1, 4), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_splitting_loses_nothing(experts: int, inner: int, hidden: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    fused = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(experts, 2 * inner, hidden, generator=generator),
        "model.layers.0.mlp.experts.down_proj": torch.randn(experts, hidden, inner, generator=generator),
    }
    split = to_checkpoint(fused)
    stem = "model.layers.0.mlp.experts"
    gate_up = [
        torch.cat([split[f"{stem}.{e}.gate_proj.weight"], split[f"{stem}.{e}.up_proj.weight"]]) for e in range(experts)
    ]
    down = [split[f"{stem}.{e}.down_proj.weight"] for e in range(experts)]
    assert torch.equal(torch.stack(gate_up), fused[f"{stem}.gate_up_proj"])
    assert torch.equal(torch.stack(down), fused[f"{stem}.down_proj"])
    assert sum(t.numel() for t in split.values()) == sum(t.numel() for t in fused.values())


@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 6)])
def test_an_unknown_expert_layout_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnknownLayoutError, match="gate_up_proj"):
        to_checkpoint({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(shape)})


async def test_the_manifest_describes_every_tensor_and_file(
    tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    board, store = MemoryBoard(), FileSystemVersionStore(tmp_path, 0)
    epoch = await board.new_trainer_epoch()
    canary = canary_sequences([[1, 5]], 32, 0)
    publisher = Publisher(store, board, "unit", epoch, tiny_checkpoints[0], canary, 4, tmp_path / "versions.jsonl")
    state = AutoModelForCausalLM.from_pretrained(tiny_checkpoints[0]).state_dict()

    record = await publisher.publish(
        state, lambda sequences: [[-1.0] * (len(ids) - 1) for ids in sequences], update=3, parent=None
    )

    manifest = store.manifest(record.name)
    store.verify(record.name)
    expected = {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in to_checkpoint(state).items()
    }
    assert {tensor.name: tensor.sha256 for tensor in manifest.tensors} == expected
    assert (manifest.update, manifest.trainer_epoch, manifest.dtype) == (3, epoch, "float32")
    assert [sequence.token_ids for sequence in manifest.canary] == canary
    assert (await board.versions())[record.name] == record


async def test_an_announcement_waits_for_a_board_that_is_away(
    tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    board, store = MemoryBoard(), FileSystemVersionStore(tmp_path, 0)
    publisher = Publisher(
        store,
        board,
        "unit",
        await board.new_trainer_epoch(),
        tiny_checkpoints[0],
        [[1, 2]],
        4,
        tmp_path / "versions.jsonl",
    )
    state = AutoModelForCausalLM.from_pretrained(tiny_checkpoints[0]).state_dict()
    announce, failures = board.announce_version, [StreamUnavailableError("away"), StreamUnavailableError("still away")]

    async def announce_later(record: VersionRecord) -> None:
        if failures:
            raise failures.pop()
        await announce(record)

    board.announce_version = announce_later  # type: ignore[method-assign]
    record = await publisher.publish(state, lambda _: [[-1.0]], update=7, parent=None)

    assert not failures
    assert await board.versions() == {record.name: record}


async def test_non_finite_weights_are_not_published(tiny_checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    board, store = MemoryBoard(), FileSystemVersionStore(tmp_path, 0)
    publisher = Publisher(
        store,
        board,
        "unit",
        await board.new_trainer_epoch(),
        tiny_checkpoints[0],
        [[1, 2]],
        4,
        tmp_path / "versions.jsonl",
    )
    state = AutoModelForCausalLM.from_pretrained(tiny_checkpoints[0]).state_dict()
    state["model.norm.weight"][3] = float("inf")
    with pytest.raises(NonFiniteWeightsError, match=r"update 7: model\.norm\.weight"):
        await publisher.publish(state, lambda _: [[-1.0]], update=7, parent=None)
    assert store.names() == []
    assert await board.versions() == {}


def test_the_canary_is_long_enough_the_same_each_time_and_inside_the_vocabulary() -> None:
    prompts = [[1, 7, 8], [1, 9]]
    canary = canary_sequences(prompts, 32, 4)
    assert canary == canary_sequences(prompts, 32, 4)
    assert canary != canary_sequences(prompts, 32, 5)
    assert len(canary) >= 4
    assert sum(map(len, canary)) >= 64
    assert all(0 <= token < 32 for ids in canary for token in ids)
    assert canary[0][:3] == prompts[0]
    with pytest.raises(ValueError, match="wrong tokenizer"):
        canary_sequences([[40]], 32, 4)


def test_an_engine_in_bfloat16_is_asked_enough_to_be_calibrated_on() -> None:
    canary = canary_sequences([[1, 7, 8], [1, 9]], 32, 4, count=sequences_for("bfloat16"))
    assert sum(len(ids) - 1 for ids in canary) >= CALIBRATION_TOKENS
    assert len({tuple(ids) for ids in canary}) == len(canary)
    assert sequences_for("float32") < sequences_for("bfloat16")


def test_the_tiny_tokenizer_loads_as_transformers_loads_it(tmp_path: Path) -> None:
    task = Calculator()
    save_tokenizer(task, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "<bos>64*27?<call>64*27</call>"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
