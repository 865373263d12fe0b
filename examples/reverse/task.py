"""A task of your own, complete: write a number backwards.

    prompt  <bos>3184?
    action  4813<eos>

Run it from the folder that holds `examples`: `sao up examples/reverse/run.toml`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from sao.preference import PreferenceDocument
from sao.tasks.base import Demonstration, Observation, Prompt, UnscorableError
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory

HERE = Path(__file__).parent
FEWEST_DIGITS, MOST_DIGITS = 3, 4
SHARE_RIGHT = 0.3
"""Share of the warm start's answers that are right."""


class ReverseEpisode:
    """One question, one answer: every action ends it."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self._wanted = prompt.text[::-1]
        self._prompt = tokenizer.encode(f"<bos>{prompt.text}?")
        self._stops = [tokenizer.token_id("<eos>")]

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._prompt

    @property
    def stop_token_ids(self) -> list[int]:
        return self._stops

    @property
    def task_payload(self) -> Mapping[str, object]:
        return {"wanted": self._wanted}

    def observe(self, action_token_ids: Sequence[int]) -> Observation:  # noqa: ARG002 - there is nothing to react to
        return Observation([], done=True)


class Reverse:
    """What sao.tasks.base.Task asks for, and what WarmStartable adds for the tiny model."""

    name: str = "reverse"
    prompts_path: Path = HERE / "prompts.jsonl"
    heldout_prompts_path: Path = HERE / "prompts.heldout.jsonl"
    components: frozenset[str] = frozenset({"exact", "in_place"})
    default_preference: PreferenceDocument = PreferenceDocument(
        name="mostly-in-place", weights={"exact": 0.5, "in_place": 0.5}
    )

    special_tokens: Sequence[str] = ("<pad>", "<bos>", "<eos>")
    vocabulary: Sequence[str] = tuple("0123456789?")
    token_unit: Literal["char", "word"] = "char"  # noqa: S105 - no password

    def episode(self, prompt: Prompt, tokenizer: Tokenizer) -> ReverseEpisode:
        return ReverseEpisode(prompt, tokenizer)

    def score(self, trajectory: Trajectory, tokenizer: Tokenizer) -> Mapping[str, float]:
        """`exact`: the answer is right. `in_place`: share of its characters that are where they belong."""
        wanted = trajectory.task_payload.get("wanted")
        if not isinstance(wanted, str) or not wanted:
            msg = f"trajectory {trajectory.id}: task payload has no text `wanted`, found {wanted!r}"
            raise UnscorableError(msg)
        action = [t for t, sampled in zip(trajectory.token_ids, trajectory.action_mask, strict=True) if sampled]
        text = tokenizer.decode(action)
        answer = text.removesuffix("<eos>")
        in_place = sum(a == w for a, w in zip(answer, wanted, strict=False)) / max(len(answer), len(wanted))
        return {"exact": float(text == f"{wanted}<eos>"), "in_place": in_place}

    def demonstrations(self, rng: random.Random) -> Iterator[Demonstration]:
        """30 % right answers; in the others some digits are replaced, so that there is something left to learn."""
        while True:
            digits = [rng.choice("0123456789") for _ in range(rng.randint(FEWEST_DIGITS, MOST_DIGITS))]
            answer = digits[::-1]
            if rng.random() > SHARE_RIGHT:
                answer = [rng.choice("0123456789") if rng.random() < 0.5 else digit for digit in answer]
            yield Demonstration(((f"<bos>{''.join(digits)}?", False), (f"{''.join(answer)}<eos>", True)))
