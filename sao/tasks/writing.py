"""Online preferences in small: a few words about a topic, in a style that a person can change their mind about.

    prompt  <bos> moon <go>
    action  nyan sparkle bright moonbeam ... <eos>

A component per style is the share of words from that style's lexicon. `quality` is 0 unless the text ends and
has 6 to 14 words; then 1, less what repetition (beyond 30 %) and special tokens in the text take away. The
preferences stay graded on purpose: a reward that saturates at 0 for every text of the old style leaves
nothing to learn from after a switch. The warm start writes 50 % of one style and 6 % of any other for the same reason.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from sao.preference import PreferenceDocument
from sao.tasks.base import Demonstration, Observation, Prompt
from sao.tasks.prompt_files import FOLDER
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory

TOPICS = ("moon", "rain", "cat", "school", "sea", "winter", "tea", "train")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NEUTRAL = _words("""
    the a and with under over near through home street window door
    night morning light water paper hand voice road garden table summer evening
""")

LEXICONS: Mapping[str, tuple[str, ...]] = {
    "cute": _words("""
        fluffy sparkle cuddle tiny nyan sweetie giggle marshmallow
        bunny twinkle snuggle cupcake blossom puppy yay kitten
    """),
    "chuunibyou": _words("""
        abyss darkflame sealed forbidden awakening crimson overlord prophecy
        doom eternal chaos demonic oblivion cursed ragnarok destiny
    """),
    "classical": _words("""
        hath whence thou solitude lament verily ere thee
        sorrow noble vermilion jade pavilion autumnal betwixt hermit
    """),
}

FEWEST_WORDS, MOST_WORDS = 6, 14
FREE_REPETITION = 0.3
"""Share of repeated words that costs nothing."""

_OWN_STYLE, _ANY_STYLE = 0.50, 0.56


def style_preference(style: str) -> PreferenceDocument:
    """Reward = quality x clip(0.5 + 0.5 x own share - 0.5 x the other styles' shares, 0, 1)."""
    weights = {f"style_{other}": 0.5 if other == style else -0.5 for other in LEXICONS}
    return PreferenceDocument(name=style, weights=weights, offset=0.5, gates=["quality"])


class WritingEpisode:
    """One text; it ends with <eos>, there is nothing to observe."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer) -> None:
        if prompt.text not in TOPICS:
            msg = f"prompt {prompt.id!r}: topic {prompt.text!r} is none of {', '.join(TOPICS)}"
            raise ValueError(msg)
        self._topic = prompt.text
        self._prompt = tokenizer.encode(f"<bos> {prompt.text} <go>")
        self._stops = [tokenizer.token_id("<eos>")]

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._prompt

    @property
    def stop_token_ids(self) -> list[int]:
        return self._stops

    @property
    def task_payload(self) -> Mapping[str, object]:
        return {"topic": self._topic}

    def observe(self, action_token_ids: Sequence[int]) -> Observation:  # noqa: ARG002 - every text ends the episode
        return Observation([], done=True)


class Writing:
    """The writing task."""

    name: str = "writing"
    prompts_path: Path = FOLDER / "writing.jsonl"
    heldout_prompts_path: Path = FOLDER / "writing.heldout.jsonl"
    components: frozenset[str] = frozenset({"quality", *(f"style_{style}" for style in LEXICONS)})
    preferences: Mapping[str, PreferenceDocument] = {style: style_preference(style) for style in LEXICONS}
    default_preference: PreferenceDocument = preferences["cute"]

    special_tokens: Sequence[str] = ("<pad>", "<bos>", "<eos>", "<go>")
    vocabulary: Sequence[str] = (*TOPICS, *NEUTRAL, *(word for words in LEXICONS.values() for word in words))
    token_unit: Literal["char", "word"] = "word"  # noqa: S105 - no password

    def episode(self, prompt: Prompt, tokenizer: Tokenizer) -> WritingEpisode:
        return WritingEpisode(prompt, tokenizer)

    def score(self, trajectory: Trajectory, tokenizer: Tokenizer) -> Mapping[str, float]:
        """The share of each style among all tokens before <eos>, and `quality`; all in [0, 1]."""
        action = [t for t, sampled in zip(trajectory.token_ids, trajectory.action_mask, strict=True) if sampled]
        tokens = tokenizer.decode(action).split()
        ended = bool(tokens) and tokens[-1] == "<eos>"
        text = tokens[:-1] if ended else tokens
        shares = {
            f"style_{style}": sum(word in words for word in text) / max(len(text), 1)
            for style, words in LEXICONS.items()
        }
        return {**shares, "quality": _quality(text) if ended else 0.0}

    def demonstrations(self, rng: random.Random) -> Iterator[Demonstration]:
        """8 to 12 words about a topic: 50 % of one style, 6 % of any style, the rest neutral words near the topic."""
        styles = list(LEXICONS.values())
        any_style = [word for words in styles for word in words]
        while True:
            topic = rng.randrange(len(TOPICS))
            own = rng.choice(styles)
            near = [NEUTRAL[(topic * 3 + step) % len(NEUTRAL)] for step in range(8)]
            words = [
                rng.choice(own if draw < _OWN_STYLE else any_style if draw < _ANY_STYLE else near)
                for draw in (rng.random() for _ in range(rng.randrange(8, 13)))
            ]
            yield Demonstration(((f"<bos> {TOPICS[topic]} <go>", False), (" ".join([*words, "<eos>"]), True)))


def _quality(text: Sequence[str]) -> float:
    if not FEWEST_WORDS <= len(text) <= MOST_WORDS:
        return 0.0
    repeated = 1 - len(set(text)) / len(text)
    clean = sum(not token.startswith("<") for token in text) / len(text)
    return clean * (1 - max(0.0, repeated - FREE_REPETITION))
