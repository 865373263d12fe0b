"""A fixed course of SAO updates on a small Qwen3-MoE, for comparing backends; also run as one rank of several.

python -m tests.support.zero_updates CHECKPOINT STAGE UPDATES OUT     (RANK, WORLD_SIZE, ... in the environment)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sao.config.schema import RunConfig
from sao.routing import NO_RECORD, RoutingShape
from services.trainer.backends.base import TrainingBackend
from services.trainer.core.update import TrajectoryTensors, Update, UpdateSettings, UpdateStats

PER_UPDATE = 3
VOCABULARY = 32
ROUTING = RoutingShape(layers=2, experts=4, per_token=2)


def zero_config(stage: int, *, ranks: int = 1, **trainer: Any) -> RunConfig:
    """Everything on: KL, entropy, clipping that binds, short chunks, frozen critic parts, replayed routes."""
    section: dict[str, Any] = {
        "zero_stage": stage,
        "ranks": ranks,
        "device": "cpu",
        "lr": 1e-3,
        "kl_coef": 0.02,
        "entropy_coef": 0.001,
        "gradient_clip": 0.5,
        "logprob_chunk": 4,
        "routing_replay": True,
    }
    return RunConfig.model_validate({"trainer": section | trainer, "critic": {"lr": 1e-3}})


def save_small_checkpoint(folder: Path, hidden: int = 32) -> Path:
    """A random untied Qwen3-MoE of one hidden width."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden,
        moe_intermediate_size=24,
        num_hidden_layers=ROUTING.layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=ROUTING.experts,
        num_experts_per_tok=ROUTING.per_token,
        norm_topk_prob=True,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def random_routes(draw: torch.Generator, rows: int) -> Tensor:
    """[rows, layers, experts per token] different experts for each token, and no record in a sixth of the rows."""
    scores = torch.rand((rows, ROUTING.layers, ROUTING.experts), generator=draw)
    routes_TLK = scores.argsort(-1)[..., : ROUTING.per_token].to(torch.uint8)
    routes_TLK[torch.rand(rows, generator=draw) < 1 / 6] = NO_RECORD
    return routes_TLK


def trajectory(index: int) -> TrajectoryTensors:
    """The index-th trajectory of the course; log-probs near those of an untrained model, routes for every other one."""
    draw = torch.Generator().manual_seed(index)
    length = 8 + index % 5
    mask_T = torch.rand(length, generator=draw) < 0.6
    mask_T[0], mask_T[1] = False, True
    logp_T = -3.4 - 0.5 * torch.rand(length, generator=draw)
    tokens_T = torch.randint(VOCABULARY, (length,), generator=draw)
    lag_T = torch.where(mask_T, index % 2, 0)
    logp_T = torch.where(mask_T, logp_T, 0.0)
    routes_TLK = random_routes(draw, length - 1) if index % 2 else None
    return TrajectoryTensors(tokens_T, mask_T, logp_T, lag_T, float(index % 3 == 0), routes_TLK=routes_TLK)


def train(backend: TrainingBackend, config: RunConfig, updates: range) -> UpdateStats:
    """The updates of the course in `updates`, this rank's share of each; the stats of the last."""
    update = Update(backend, UpdateSettings.of(config))
    share = range(backend.rank, -(-PER_UPDATE // backend.world_size) * backend.world_size, backend.world_size)
    stats: UpdateStats | None = None
    for number in updates:
        update.begin(critic_only=number == 0)
        for place in share:
            real = place < PER_UPDATE
            update.accumulate(trajectory(PER_UPDATE * number + place) if real else TrajectoryTensors.dummy())
        stats = update.finish()
        assert not stats.skipped, stats.skipped_reason
    assert stats is not None
    return stats


def states(backend: TrainingBackend) -> dict[str, Tensor]:
    """Every tensor of both networks."""
    return {f"policy.{name}": tensor for name, tensor in backend.policy_state().items()} | {
        f"critic.{name}": tensor for name, tensor in backend.critic_state().items()
    }


def norms(stats: UpdateStats) -> dict[str, Tensor]:
    """Gradient norms before clipping: AdamW and clipping hide a wrong divisor, these do not."""
    return {name: torch.tensor(stats.metrics[name]) for name in ("policy_grad_norm", "critic_grad_norm")}


def main(checkpoint: str, stage: str, updates: str, out: str) -> None:
    """One rank: train from scratch, save and load half-way, write the tensors (rank 0)."""
    from safetensors.torch import save_file

    from services.trainer.backends import zero
    from services.trainer.backends.deepspeed import DeepSpeedBackend

    zero.PERSISTENCE_THRESHOLD = 0  # partition also what is as small as everything here
    config = zero_config(int(stage), ranks=int(os.environ["WORLD_SIZE"]))
    middle = int(updates) // 2
    backend = DeepSpeedBackend(config, Path(checkpoint))
    train(backend, config, range(middle))
    folder = Path(out).with_suffix(".saved")
    folder.mkdir(exist_ok=True)
    backend.save(folder)
    backend.sum_over_ranks([0.0])  # every file is there before any rank reads it
    train(backend, config, range(middle, middle + 1))
    backend.load(folder)
    stats = train(backend, config, range(middle, int(updates)))
    tensors = states(backend) | norms(stats)
    if backend.rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out)
    backend.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
