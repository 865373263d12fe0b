"""The task boundary: what a user writes to teach the model something new. One file a task.

A task knows text and token ids, never engines, Redis or torch. It supplies prompts, plays the environment
of an episode, and computes named raw reward components; what these are worth is the preference's business.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from sao.preference import PreferenceDocument
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompts file: a stable id, the text, and anything the task wants beside it."""

    id: str
    text: str
    data: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment appends after an action; `done` ends the episode (token_ids may then be empty)."""

    token_ids: list[int]
    done: bool


class Episode(Protocol):
    """The environment's side of one rollout."""

    @property
    def prompt_token_ids(self) -> list[int]: ...

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a turn (they are sampled, and belong to the action)."""

    def observe(self, action_token_ids: Sequence[int]) -> Observation:
        """React to one finished action. A malformed one is normal: it gets an observation, not an exception."""

    @property
    def task_payload(self) -> Mapping[str, object]:
        """What `score` needs beside the tokens; JSON-serialisable."""


class Task(Protocol):
    """Everything the system needs to know about one task."""

    name: str
    prompts_path: Path
    heldout_prompts_path: Path
    default_preference: PreferenceDocument
    components: frozenset[str]

    def episode(self, prompt: Prompt, tokenizer: Tokenizer) -> Episode: ...

    def score(self, trajectory: Trajectory, tokenizer: Tokenizer) -> Mapping[str, float]:
        """Every component by name, finite. Raises UnscorableError when this trajectory can never be scored."""


class UnscorableError(Exception):
    """The trajectory lacks what scoring needs; it is a dead letter, not a zero."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One supervised example: (text, whether the model should learn to produce it), in order."""

    pieces: tuple[tuple[str, bool], ...]


@runtime_checkable
class OffersPreferences(Protocol):
    """A task that names the preferences a person may want to switch between (the live view prints them)."""

    preferences: Mapping[str, PreferenceDocument]


Scorer = Callable[[Trajectory, Tokenizer], Mapping[str, float]]
"""Computes some of a task's components; may be slow, and raises UnscorableError as `Task.score` does."""


@runtime_checkable
class SeparatelyScored(Protocol):
    """A task whose components come from several scorers, so that each has its own deadline and its own name in errors.

    Together they give what `score` gives.
    """

    scorers: Mapping[str, Scorer]


@runtime_checkable
class WarmStartable(Protocol):
    """A task that can also teach a tiny model its language from scratch (the CPU presets)."""

    vocabulary: Sequence[str]
    """Ordinary tokens, in id order after the special ones."""
    special_tokens: Sequence[str]
    """In id order from 0; the first three are pad, begin and end."""
    token_unit: Literal["char", "word"]

    def demonstrations(self, rng: random.Random) -> Iterator[Demonstration]:
        """Endless examples, a deliberate mix of good and bad, so that reinforcement has something to do."""
