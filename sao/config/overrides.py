"""Single settings from outside the file: `--set a.b=value` and `SAO__A__B=value`.

Values are written as in TOML (`4`, `true`, `["a", "b"]`). Where a setting takes text only, quotes may be left out, and
`none` removes a setting that may be absent. Secrets are taken as they are, character for character.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from sao.config import keys as schema_keys
from sao.config.errors import ConfigError

ENVIRONMENT_PREFIX = "SAO__"


def apply_environment(tables: dict[str, Any], env: Mapping[str, str]) -> None:
    """Put every `SAO__SECTION__KEY` variable into the tables, in alphabetical order."""
    for variable, text in sorted(env.items()):
        if variable.startswith(ENVIRONMENT_PREFIX):
            keys = variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            _assign(tables, keys, text, origin=f"environment {variable}")


def apply_sets(tables: dict[str, Any], sets: Sequence[str]) -> None:
    """Put every `section.key=value` into the tables; a later one wins."""
    for item in sets:
        dotted, separator, text = item.partition("=")
        if not separator or not dotted.strip():
            raise ConfigError(item, "expected section.key=value after --set")
        _assign(tables, [key.strip() for key in dotted.split(".")], text.strip(), origin="--set")


def _assign(tables: dict[str, Any], keys: list[str], text: str, *, origin: str) -> None:
    field = schema_keys.find(keys, origin)
    table = tables
    for depth, key in enumerate(keys[:-1], start=1):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(".".join(keys[:depth]), f"is {table!r} in the run file, expected a table")
    if text == "none" and field is not None and schema_keys.takes_none(field) and not schema_keys.is_secret(field):
        table.pop(keys[-1], None)
        return
    table[keys[-1]] = _value(field, text)


def _value(field: FieldInfo | None, text: str) -> object:
    if field is not None and schema_keys.is_secret(field):
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    if field is not None and schema_keys.takes_text_only(field) and not isinstance(value, str):
        return text
    return value
