"""The tokenizer of a tiny model, made from its task's vocabulary alone, so that every process agrees on it.

Ids run special tokens, vocabulary, then `<unusedN>` up to a multiple of 8. For every sequence of known ids
encode(decode(ids)) == ids: a `char` task writes tokens one after another, a `word` task with single spaces
between them, special tokens included. Text outside the vocabulary is an error, not an unknown token.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from sao.tasks.base import Task, WarmStartable
from sao.tokenizer import FileTokenizer, Tokenizer

MULTIPLE = 8
"""The vocabulary is padded to a multiple of this many tokens."""


class VocabularyError(ValueError):
    """A task's vocabulary cannot be told apart in text."""


def tiny_vocabulary(task: WarmStartable) -> list[str]:
    """Every token in id order, padding included; VocabularyError when the round trip could not hold."""
    tokens = [*task.special_tokens, *task.vocabulary]
    if len(task.special_tokens) < 3:
        msg = f"special_tokens {list(task.special_tokens)}: the first three must be pad, begin and end"
        raise VocabularyError(msg)
    repeated = sorted({token for token in tokens if tokens.count(token) > 1})
    if repeated:
        msg = f"tokens occur twice in the vocabulary: {repeated}"
        raise VocabularyError(msg)
    odd = [token for token in task.special_tokens if not (token.startswith("<") and token.endswith(">"))]
    odd += [token for token in task.special_tokens if any(c.isspace() for c in token)]
    odd += [token for token in task.vocabulary if not _ordinary(token, task.token_unit)]
    if odd:
        msg = f"unusable tokens {odd}: special ones are <written-so>; others hold no '<' and are one {task.token_unit}"
        raise VocabularyError(msg)
    return tokens + [f"<unused{i}>" for i in range(len(tokens), -(-len(tokens) // MULTIPLE) * MULTIPLE)]


def build_tokenizer_json(task: WarmStartable) -> str:
    """The task's tokenizer as the text of a Hugging Face `tokenizer.json`."""
    vocabulary = tiny_vocabulary(task)
    tokenizer = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}))
    if task.token_unit == "char":  # noqa: S105 - no password
        marked = [token for token in vocabulary if token.startswith("<")]
        tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in marked])
        tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    else:
        # Words need no added tokens: whitespace alone separates special tokens too, and decoding joins with a space.
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text: str = tokenizer.to_str()
    return text


def tokenizer_of_run(model_path: Path | None, task: Task | WarmStartable) -> Tokenizer:
    """The tokenizer a run uses: that of its checkpoint, or, without one, the tiny model's.

    Raises VocabularyError when there is neither a checkpoint nor a vocabulary.
    """
    if model_path is not None:
        return FileTokenizer(model_path.expanduser() / "tokenizer.json")
    if not isinstance(task, WarmStartable):
        msg = f"task {task.name!r} has no vocabulary for a tiny model: name a checkpoint in model.path"
        raise VocabularyError(msg)
    return FileTokenizer.from_json(build_tokenizer_json(task))


def _ordinary(token: str, unit: str) -> bool:
    if "<" in token:
        return False
    if unit == "char":
        return len(token) == 1
    return bool(token) and not any(c.isspace() for c in token)
