"""The tiny Qwen3-MoE of the CPU presets: untied (SGLang never ties its head), float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from sao.config.schema import ModelSection
from sao.tasks.base import WarmStartable
from sao.tasks.tiny_tokenizer import build_tokenizer_json

CONTEXT = 1024


def build_tiny_model(shape: ModelSection, vocab_size: int, seed: int, *, context: int = CONTEXT) -> Any:  # noqa: ANN401
    """A freshly initialised Qwen3MoeForCausalLM; ids 0, 1, 2 are pad, begin and end."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=4 * shape.hidden_size,
        moe_intermediate_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=max(16, shape.hidden_size // 4),
        num_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        rope_theta=10000.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        router_aux_loss_coef=0.001,
    )
    return Qwen3MoeForCausalLM(config).to(torch.float32)


def save_tokenizer(task: WarmStartable, folder: Path) -> None:
    """Write `tokenizer.json` and the settings with which AutoTokenizer and SGLang load it."""
    pad, begin, end = task.special_tokens[:3]
    (folder / "tokenizer.json").write_text(build_tokenizer_json(task))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": begin,
        "eos_token": end,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
