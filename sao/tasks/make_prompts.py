"""Make the prompt files of our own tasks: `python -m sao.tasks.make_prompts [FOLDER]`, the same bytes every time."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from sao.tasks.base import Prompt
from sao.tasks.prompt_files import FOLDER, save_prompts
from sao.tasks.writing import TOPICS

CALCULATOR_TRAIN, CALCULATOR_HELDOUT = 4096, 256
WRITING_TRAIN, WRITING_HELDOUT = 32, 8
"""Per topic."""


def calculator_prompts() -> list[Prompt]:
    """Every two-digit calculation there is (24 300), in a fixed shuffled order."""
    named = {"add": "+", "sub": "-", "mul": "*"}
    every = [
        Prompt(f"{name}-{left}-{right}", f"{left}{operator}{right}", {})
        for name, operator in named.items()
        for left in range(10, 100)
        for right in range(10, 100)
    ]
    return sorted(every, key=lambda prompt: hashlib.sha256(prompt.id.encode()).digest())


def writing_prompts(prefix: str, per_topic: int) -> list[Prompt]:
    """Each topic `per_topic` times; the text repeats, the ids do not."""
    return [Prompt(f"{prefix}{topic}-{i:03d}", topic, {}) for i in range(per_topic) for topic in TOPICS]


def main(folder: Path = FOLDER) -> None:
    """Write the four files into `folder`."""
    calculations = calculator_prompts()
    end = CALCULATOR_TRAIN + CALCULATOR_HELDOUT
    save_prompts(folder / "calculator.jsonl", calculations[:CALCULATOR_TRAIN])
    save_prompts(folder / "calculator.heldout.jsonl", calculations[CALCULATOR_TRAIN:end])
    save_prompts(folder / "writing.jsonl", writing_prompts("", WRITING_TRAIN))
    save_prompts(folder / "writing.heldout.jsonl", writing_prompts("heldout-", WRITING_HELDOUT))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
