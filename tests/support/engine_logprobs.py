"""Log-probs of the same sequences from transformers and from a running engine."""

from __future__ import annotations

import random
from pathlib import Path

import httpx

from sao.tasks import load_task
from sao.tasks.prompt_files import load_prompts
from sao.tokenizer import FileTokenizer


def held_out_sequences(model: Path, *, count: int, length: int = 24) -> list[list[int]]:
    """Held-out prompts, each continued with seeded random ordinary tokens."""
    tokenizer = FileTokenizer(model / "tokenizer.json")
    task = load_task("calculator")
    rng = random.Random(17)
    sequences = []
    for prompt in load_prompts(task.heldout_prompts_path)[:count]:
        ids = list(task.episode(prompt, tokenizer).prompt_token_ids)
        ids += [rng.randrange(3, tokenizer.vocab_size) for _ in range(length - len(ids))]
        sequences.append(ids)
    return sequences


def transformers_logprobs(model: Path, sequences: list[list[int]]) -> list[list[float]]:
    """log p(ids[i+1] | ids[:i+1]) by AutoModelForCausalLM in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    result = []
    with torch.no_grad():
        for ids in sequences:
            logits = network(torch.tensor([ids])).logits[0, :-1]
            chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])
            result.append(chosen[:, 0].tolist())
    return result


def engine_logprobs(url: str, sequences: list[list[int]]) -> list[list[float]]:
    """The same from SGLang's prompt scoring."""
    body = {
        "input_ids": sequences,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = httpx.post(f"{url}/generate", json=body, timeout=60)
    answer.raise_for_status()
    return [[entry[0] for entry in item["meta_info"]["input_token_logprobs"][1:]] for item in answer.json()]
