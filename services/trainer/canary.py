"""The canary: fixed token sequences whose log-probs, from the trainer itself, an engine must reproduce."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

SEQUENCES = 4
LENGTH = 24
BFLOAT16_LOGPROBS = 512
"""How many an engine in bfloat16 is calibrated on: its bounds are a mean and a 99th percentile."""
PROMPT_TOKENS = 10


def sequences_for(engine_dtype: str, *, length: int = LENGTH) -> int:
    """How many sequences of `length` an engine of this dtype is to be asked; each gives one log-prob less."""
    return SEQUENCES if engine_dtype == "float32" else math.ceil(BFLOAT16_LOGPROBS / (length - 1))


def canary_sequences(
    prompts: Sequence[Sequence[int]], vocab_size: int, seed: int, *, count: int = SEQUENCES, length: int = LENGTH
) -> list[list[int]]:
    """`count` sequences of `length` token ids: the start of a real prompt, then seeded random ids.

    Prompts alone would use few experts and few rows of the embedding, and so miss a wrong layout in the
    others. The same arguments give the same sequences, so a restarted trainer asks the same questions.
    Raises ValueError when a prompt's id lies outside the vocabulary.
    """
    rng = random.Random(f"canary-{seed}")  # noqa: S311
    sequences: list[list[int]] = []
    for i in range(count):
        ids = list(prompts[i % len(prompts)][:PROMPT_TOKENS]) if prompts else []
        if any(token >= vocab_size for token in ids):
            msg = f"canary prompt {i} holds token {max(ids)}, the vocabulary ends at {vocab_size - 1}: wrong tokenizer"
            raise ValueError(msg)
        ids += [rng.randrange(vocab_size) for _ in range(length - len(ids))]
        sequences.append(ids)
    return sequences
