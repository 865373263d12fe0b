"""Random tiny Qwen3-MoE checkpoints that both transformers and SGLang load."""

from __future__ import annotations

import json
from pathlib import Path

from sao.tasks.calculator import Calculator
from sao.tasks.tiny_tokenizer import build_tokenizer_json


def make_tiny_checkpoint(folder: Path, seed: int) -> Path:
    """An untied float32 model with sharpened random weights and the calculator's tokenizer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """The calculator's, as SGLang reads it."""
    (folder / "tokenizer.json").write_text(build_tokenizer_json(Calculator()))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
