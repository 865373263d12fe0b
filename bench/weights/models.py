"""A Qwen3-MoE of a hundred million parameters with random weights, for what depends on the bytes."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny_checkpoint import write_tokenizer


def make_large_checkpoint(folder: Path) -> Path:
    """103 million parameters, 411 MB in float32, an untied head and the calculator's tokenizer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=14,
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
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
