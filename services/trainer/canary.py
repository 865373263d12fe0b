"""The canary: fixed token sequences whose log-probs, from the trainer itself, an engine must reproduce."""

from __future__ import annotations

import random
from collections.abc import Sequence

SEQUENCES = 4
LENGTH = 24
PROMPT_TOKENS = 10


def canary_sequences(
    prompts: Sequence[Sequence[int]], vocab_size: int, seed: int, *, length: int = LENGTH
) -> list[list[int]]:
    """Four sequences of `length` token ids: the start of a real prompt, then seeded random ids.

    Prompts alone would use few experts and few rows of the embedding, and so miss a wrong layout in the
    others. The same arguments give the same sequences, so a restarted trainer asks the same questions.
    Raises ValueError when a prompt's id lies outside the vocabulary.
    """
    rng = random.Random(f"canary-{seed}")  # noqa: S311
    sequences: list[list[int]] = []
    for i in range(SEQUENCES):
        ids = list(prompts[i % len(prompts)][:PROMPT_TOKENS]) if prompts else []
        if any(token >= vocab_size for token in ids):
            msg = f"canary prompt {i} holds token {max(ids)}, the vocabulary ends at {vocab_size - 1}: wrong tokenizer"
            raise ValueError(msg)
        ids += [rng.randrange(vocab_size) for _ in range(length - len(ids))]
        sequences.append(ids)
    return sequences
