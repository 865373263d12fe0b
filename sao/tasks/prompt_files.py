"""Prompt files: JSON lines `{"id": ..., "text": ..., anything else}`, and the order in which a run walks them.

The order is a pure function of (number of prompts, ordinal, seed): any worker, after any restart, gets the
same prompt for the same ordinal, and each epoch gives every prompt once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from sao.tasks.base import Prompt

FOLDER = Path(__file__).parent / "prompts"
"""Where the files of our own tasks lie."""


class PromptFileError(ValueError):
    """A prompt file is unusable; the message names the file and the line."""


def load_prompts(path: Path) -> list[Prompt]:
    """Every prompt of the file, in order; blank lines are skipped.

    Raises PromptFileError when the file is missing or empty, a line is not an object with a non-empty string
    `id` and a string `text`, or an id occurs twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"cannot read prompts from {path}: {error}"
        raise PromptFileError(msg) from error
    prompts: list[Prompt] = []
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _parse(line, f"{path}:{number}")
        if prompt.id in first_line:
            msg = f"{path}:{number}: prompt id {prompt.id!r} is taken by line {first_line[prompt.id]}; ids are unique"
            raise PromptFileError(msg)
        first_line[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        msg = f"{path} holds no prompt; expected one JSON object a line with id and text"
        raise PromptFileError(msg)
    return prompts


def save_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write a file that `load_prompts` reads back equal."""
    rows = ({"id": prompt.id, "text": prompt.text, **prompt.data} for prompt in prompts)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def prompt_for(prompts: Sequence[Prompt], ordinal: int, seed: int) -> Prompt:
    """The prompt at position `ordinal` (from 0) of the run's endless order: one seeded permutation per epoch."""
    if ordinal < 0 or not prompts:
        msg = f"no prompt for ordinal {ordinal} among {len(prompts)}; ordinals count from 0"
        raise IndexError(msg)
    epoch, position = divmod(ordinal, len(prompts))
    return prompts[_order(len(prompts), seed, epoch)[position]]


@lru_cache(maxsize=8)
def _order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    # Sorting by a hash, not random.shuffle: its result is promised by no Python version, and ordinals outlive them.
    def key(index: int) -> bytes:
        return hashlib.sha256(f"{seed}:{epoch}:{index}".encode()).digest()

    return tuple(sorted(range(count), key=key))


def _parse(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        msg = f"{where}: not JSON ({error})"
        raise PromptFileError(msg) from error
    if not isinstance(row, dict):
        msg = f"{where}: found {type(row).__name__}, expected an object with id and text"
        raise PromptFileError(msg)
    prompt_id, text = row.pop("id", None), row.pop("text", None)
    if not isinstance(prompt_id, str) or not prompt_id or not isinstance(text, str):
        msg = f"{where}: expected a non-empty string id and a string text, found id {prompt_id!r}, text {text!r}"
        raise PromptFileError(msg)
    return Prompt(prompt_id, text, row)
