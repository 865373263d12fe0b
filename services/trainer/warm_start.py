"""Teach a tiny model its task's language from scratch: supervised training on the task's demonstrations.

`python -m services.trainer.warm_start --config RUN.toml --out DIR [--progress-json]`. The result is cached
under the run's cache_dir by the hash of everything that shaped it. 700 steps of 32 take about 25 CPU seconds;
450 are too few, copying is not learned by then.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sao.config import ConfigError, load_run_config
from sao.config.schema import RunConfig
from sao.tasks import load_task
from sao.tasks.base import Demonstration, WarmStartable
from sao.tasks.tiny_tokenizer import tiny_vocabulary
from sao.tokenizer import FileTokenizer, Tokenizer
from services.trainer.tiny_model import build_tiny_model, save_tokenizer
from services.trainer.warm_start_key import warm_start_path

RAMP_STEPS = 30
AUX_COEF = 0.01
"""Weight of the router's load-balancing loss; without it one expert wins."""
PROGRESS_EVERY = 10

Progress = Callable[[int, int, float], None]


def encode_demonstration(demonstration: Demonstration, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Token ids and, for each, whether the model learns to produce it."""
    ids: list[int] = []
    learn: list[bool] = []
    for text, produced in demonstration.pieces:
        piece = tokenizer.encode(text)
        ids += piece
        learn += [produced] * len(piece)
    return ids, learn


def collate(rows: list[tuple[list[int], list[bool]]]) -> tuple[Tensor, Tensor, Tensor]:
    """ids, attention mask, learn mask, each [B, T], padded at the end with id 0."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    present = torch.zeros(len(rows), longest, dtype=torch.long)
    learn = torch.zeros(len(rows), longest)
    for i, (row_ids, row_learn) in enumerate(rows):
        ids[i, : len(row_ids)] = torch.tensor(row_ids)
        present[i, : len(row_ids)] = 1
        learn[i, : len(row_ids)] = torch.tensor(row_learn, dtype=torch.float32)
    return ids, present, learn


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear ramp over the first steps, then a cosine down to 5 % of the peak."""
    cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))
    return peak * min(1.0, (step + 1) / RAMP_STEPS) * cosine


def train(model: Any, batches: Iterator[tuple[Tensor, Tensor, Tensor]], config: RunConfig, progress: Progress) -> float:  # noqa: ANN401
    """Supervised steps in place; the last loss (nats per learned token)."""
    steps, peak = config.warm_start.steps, config.warm_start.lr
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    loss_value = math.nan
    for step, (ids, present, learn) in enumerate(islice(batches, steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        out = model(input_ids=ids, attention_mask=present, use_cache=False, output_router_logits=True)
        logp = torch.log_softmax(out.logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        weight = learn[:, 1:]
        loss = -(logp * weight).sum() / weight.sum()
        (loss + AUX_COEF * out.aux_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_value = float(loss.detach())
        if (step + 1) % PROGRESS_EVERY == 0 or step + 1 == steps:
            progress(step + 1, steps, loss_value)
    if not math.isfinite(loss_value):
        msg = f"warm start of task {config.task.name!r} diverged: the last loss is {loss_value}; lower warm_start.lr"
        raise ArithmeticError(msg)
    return loss_value


def warm_start(config: RunConfig, out: Path, progress: Progress) -> Path:
    """Build, train and save the tiny model into `out`, which appears whole or not at all; returns `out`.

    Raises ConfigError when the task has no demonstrations, ArithmeticError when training diverges.
    """
    task = load_task(config.task.name)
    if not isinstance(task, WarmStartable):
        raise ConfigError(key="model.path", message=f"task {config.task.name!r} has no demonstrations")
    torch.set_num_threads(1)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        save_tokenizer(task, work)
        tokenizer = FileTokenizer(work / "tokenizer.json")
        model = build_tiny_model(config.model, len(tiny_vocabulary(task)), config.run.seed)
        train(model, _batches(task, tokenizer, config), config, progress)
        model.save_pretrained(work)
        if not (out / "config.json").exists():
            work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def _batches(task: WarmStartable, tokenizer: Tokenizer, config: RunConfig) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    examples = task.demonstrations(random.Random(config.run.seed))  # noqa: S311
    while True:
        yield collate([encode_demonstration(d, tokenizer) for d in islice(examples, config.warm_start.batch)])


def _print_json(step: int, steps: int, loss: float) -> None:
    sys.stdout.write(json.dumps({"step": step, "steps": steps, "loss": round(loss, 5)}) + "\n")
    sys.stdout.flush()


def _print_text(step: int, steps: int, loss: float) -> None:
    if step % 100 == 0 or step == steps:
        sys.stdout.write(f"warm start {step}/{steps}, loss {loss:.3f}\n")
        sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Command line; 0 when the checkpoint is there, 2 for a wrong setting."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer.warm_start", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="default: the cache folder of this configuration")
    parser.add_argument("--progress-json", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        config = load_run_config(arguments.config)
        out = arguments.out or warm_start_path(config)
        if not (out / "config.json").exists():
            warm_start(config, out, _print_json if arguments.progress_json else _print_text)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write((json.dumps({"done": str(out)}) if arguments.progress_json else f"warm start in {out}") + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
