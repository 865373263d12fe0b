"""What a wrong setting raises, wherever it is found out."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting is wrong: `key` is its dotted name, the message says what was found and what is expected."""

    def __init__(self, key: str, message: str) -> None:
        self.key = key
        super().__init__(f"{key}: {message}")
