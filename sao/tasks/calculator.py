"""Tool use in small: a two-digit sum, difference or product that the policy can have calculated for it.

    prompt       <bos>64*27?
    action       <call>64*27</call>
    observation  <obs>+1728</obs>
    action       <ans>+1728<eos>

Numbers the calculator writes are a sign and four digits. `correct` is 1 exactly when the text between the
last action's first <ans> and its final <eos> is the right one. The warm start mixes right and wrong ways so
that about a quarter of the answers are right before reinforcement (settings and results: docs/tasks.md).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from sao.preference import PreferenceDocument
from sao.tasks.base import Demonstration, Observation, Prompt, UnscorableError
from sao.tasks.prompt_files import FOLDER
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from sao.v1 import trajectory_pb2 as pb

MAX_CALLS = 4
"""One more call than this ends the episode."""
ERROR = "E"
"""What the calculator answers to anything it cannot read or write."""

_EXPRESSION = re.compile(r"([+-]?[0-9]{1,6})([+\-*])([0-9]{1,6})")
_RIGHT, _GUESS, _WRONG_CALL = 0.18, 0.38, 0.22
"""Shares of the warm-start mix; the rest calls rightly and then answers something else."""


def calculate(expression: str) -> int | None:
    """The value of `a op b`; None when the text is not exactly that. Nothing is ever evaluated as code."""
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        return None
    left, operator, right = int(match[1]), match[2], int(match[3])
    return left + right if operator == "+" else left - right if operator == "-" else left * right


def written(value: int | None) -> str:
    """A number as the calculator writes it: sign and four digits; ERROR when there is none or it does not fit."""
    if value is None or abs(value) > 9999:
        return ERROR
    return f"{value:+05d}"


class CalculatorEpisode:
    """One question; a call gets its result, anything else ends the episode."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer) -> None:
        truth = written(calculate(prompt.text))
        if truth == ERROR:
            msg = f"prompt {prompt.id!r}: {prompt.text!r} is not a calculation such as 64*27 with a four-digit result"
            raise ValueError(msg)
        self._tokenizer = tokenizer
        self._truth = truth
        self._calls = 0
        self._prompt = tokenizer.encode(f"<bos>{prompt.text}?")
        self._stops = [tokenizer.token_id("<eos>"), tokenizer.token_id("</call>")]

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._prompt

    @property
    def stop_token_ids(self) -> list[int]:
        return self._stops

    @property
    def task_payload(self) -> Mapping[str, object]:
        return {"truth": self._truth}

    def observe(self, action_token_ids: Sequence[int]) -> Observation:
        """The result of a call, ERROR for one that cannot be read; the end after <eos> or too many calls."""
        text = self._tokenizer.decode(action_token_ids)
        if not text.endswith("</call>"):
            return Observation([], done=True)
        self._calls += 1
        if self._calls > MAX_CALLS:
            return Observation([], done=True)
        _, _, expression = text.removesuffix("</call>").rpartition("<call>")
        called = "<call>" in text
        result = written(calculate(expression)) if called else ERROR
        return Observation(self._tokenizer.encode(f"<obs>{result}</obs>"), done=False)


class Calculator:
    """The calculator task."""

    name: str = "calculator"
    prompts_path: Path = FOLDER / "calculator.jsonl"
    heldout_prompts_path: Path = FOLDER / "calculator.heldout.jsonl"
    components: frozenset[str] = frozenset({"correct", "used_calculator"})
    default_preference: PreferenceDocument = PreferenceDocument(name="right", weights={"correct": 1.0})
    preferences: Mapping[str, PreferenceDocument] = {
        "right": default_preference,
        "with-calculator": PreferenceDocument(
            name="with-calculator", weights={"correct": 1.0}, gates=["used_calculator"]
        ),
    }

    special_tokens: Sequence[str] = ("<pad>", "<bos>", "<eos>", "<call>", "</call>", "<obs>", "</obs>", "<ans>")
    vocabulary: Sequence[str] = tuple("0123456789+-*=?:E ")
    token_unit: Literal["char", "word"] = "char"  # noqa: S105 - no password

    def episode(self, prompt: Prompt, tokenizer: Tokenizer) -> CalculatorEpisode:
        return CalculatorEpisode(prompt, tokenizer)

    def score(self, trajectory: Trajectory, tokenizer: Tokenizer) -> Mapping[str, float]:
        """`correct` and `used_calculator` (a call was answered with a number), each 0 or 1."""
        truth = trajectory.task_payload.get("truth")
        if not isinstance(truth, str):
            msg = f"trajectory {trajectory.id}: task payload has no text `truth`, found {truth!r}"
            raise UnscorableError(msg)
        segments = trajectory.message.segments
        observed = [tokenizer.decode(s.token_ids) for s in segments if s.kind == pb.SEGMENT_KIND_OBSERVATION]
        last = tokenizer.decode(segments[-1].token_ids) if segments else ""
        ended = bool(segments) and segments[-1].kind == pb.SEGMENT_KIND_ACTION and last.endswith("<eos>")
        _, marker, answer = last.removesuffix("<eos>").partition("<ans>")
        return {
            "correct": float(ended and bool(marker) and answer == truth),
            "used_calculator": float(any(text != f"<obs>{ERROR}</obs>" for text in observed)),
        }

    def demonstrations(self, rng: random.Random) -> Iterator[Demonstration]:
        """18 % right, 38 % a guess without a call, 22 % a call with a wrong operand, the rest a wrong answer."""
        while True:
            yield self._demonstration(rng)

    def _demonstration(self, rng: random.Random) -> Demonstration:
        left, right = str(rng.randrange(10, 100)), str(rng.randrange(10, 100))
        operator = rng.choice("+-*")
        prompt = (f"<bos>{left}{operator}{right}?", False)
        way = rng.random()
        if _RIGHT <= way < _RIGHT + _GUESS:
            return Demonstration((prompt, (f"<ans>{_random_number(rng)}<eos>", True)))
        if _RIGHT + _GUESS <= way < _RIGHT + _GUESS + _WRONG_CALL:
            right = "".join(rng.choice("123456789") for _ in right)
        result = written(calculate(f"{left}{operator}{right}"))
        answer = result if way < _RIGHT + _GUESS + _WRONG_CALL else _random_number(rng)
        call, observation = f"<call>{left}{operator}{right}</call>", f"<obs>{result}</obs>"
        return Demonstration((prompt, (call, True), (observation, False), (f"<ans>{answer}<eos>", True)))


def _random_number(rng: random.Random) -> str:
    return rng.choice("+-") + "".join(rng.choice("0123456789") for _ in range(4))
