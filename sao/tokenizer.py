"""The tokenizer boundary: Hugging Face `tokenizers`, without transformers or torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import tokenizers


class Tokenizer(Protocol):
    """Text to ids and back, exactly: no template, nothing added, nothing stripped."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included."""

    def token_id(self, token: str) -> int:
        """Id of one token; KeyError when the vocabulary lacks it."""

    @property
    def vocab_size(self) -> int: ...


class FileTokenizer:
    """A `tokenizer.json`, as every Hugging Face checkpoint carries one."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))

    @classmethod
    def from_json(cls, text: str) -> FileTokenizer:
        """The same from the file's text, for a tokenizer that is made and never written."""
        made = cls.__new__(cls)
        made._tokenizer = tokenizers.Tokenizer.from_str(text)  # noqa: SLF001 - its own
        return made

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def token_id(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise KeyError(token)
        return int(found)

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))
