"""The settings by their dotted names, read off the schema: what exists, what takes text, what is secret."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from sao.config.errors import ConfigError
from sao.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the run file."""

    section: str
    """`reward`, or `reward.feedback` of a table within it."""
    name: str
    field: FieldInfo

    @property
    def key(self) -> str:
        """`section.name`."""
        return f"{self.section}.{self.name}"

    @property
    def secret(self) -> bool:
        """Whether its value is passed by the environment only, and never written or shown."""
        return is_secret(self.field)


@cache
def all_settings() -> tuple[Setting, ...]:
    """Every setting, in the schema's order; a section that may be missing (`preference`) has its own keys here too."""
    return tuple(
        setting
        for section, of in RunConfig.model_fields.items()
        for model in _models(of.annotation)
        for setting in _settings_of(section, model)
    )


def _settings_of(section: str, model: type[BaseModel]) -> Iterator[Setting]:
    """Its values, then those of the tables within it."""
    tables = {name: next(_models(field.annotation), None) for name, field in model.model_fields.items()}
    yield from (Setting(section, name, field) for name, field in model.model_fields.items() if tables[name] is None)
    for name, table in tables.items():
        if table is not None:
            yield from _settings_of(f"{section}.{name}", table)


def section_of(config: RunConfig, section: str) -> BaseModel | None:
    """The table of this name; none: the run has no such."""
    found: Any = config
    for name in section.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, BaseModel) else None


def alternatives(annotation: Any) -> list[Any]:  # noqa: ANN401 - annotations have no common type
    """The types a field takes, unions and Annotated taken apart; a Literal stays one."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in {Union, types.UnionType}:
        return [kind for part in get_args(annotation) for kind in alternatives(part)]
    return [annotation]


def takes_text_only(field: FieldInfo) -> bool:
    """Whether every value of this field but none is a string, so that `123` means the text "123"."""
    kinds = [kind for kind in alternatives(field.annotation) if kind is not type(None)]
    return all(kind in {str, SecretStr, Path} or get_origin(kind) is Literal for kind in kinds)


def is_secret(field: FieldInfo) -> bool:
    """Whether the schema calls it a secret."""
    return SecretStr in alternatives(field.annotation)


def takes_none(field: FieldInfo) -> bool:
    """Whether the setting may be absent."""
    return type(None) in alternatives(field.annotation)


def find(keys: Sequence[str], origin: str) -> FieldInfo | None:
    """The field that a dotted key names; None inside a free-form table (`preference.weights.<component>`).

    ConfigError, with the nearest existing key, when the schema has no such key.
    """
    model: type[BaseModel] = RunConfig
    for depth, key in enumerate(keys, start=1):
        field = model.model_fields.get(key)
        if field is None:
            raise ConfigError(".".join(keys), f"unknown key ({origin}){suggestion(keys)}")
        models = list(_models(field.annotation))
        if not models:
            if depth == len(keys):
                return field
            if any(get_origin(kind) is dict for kind in alternatives(field.annotation)):
                return None
            raise ConfigError(".".join(keys), f"{'.'.join(keys[:depth])} is a value, not a table ({origin})")
        model = models[0]
    raise ConfigError(".".join(keys), f"is a table; name one of its keys: {', '.join(model.model_fields)} ({origin})")


def suggestion(keys: Sequence[str]) -> str:
    """`; did you mean a.b?` for a key that does not exist, or which keys there are."""
    if len(keys) > 1 and keys[0] in RunConfig.model_fields:
        known = [s.key for s in all_settings() if s.key.startswith(f"{keys[0]}.")]
        near = difflib.get_close_matches(".".join(keys), known, n=1) or _same_name(keys[-1])
        return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
    sections = list(RunConfig.model_fields)
    near = difflib.get_close_matches(keys[0], sections, n=1) or _same_name(keys[-1])
    return f"; did you mean {near[0]}?" if near else f"; the sections are {', '.join(sections)}"


def dotted(location: Sequence[int | str]) -> tuple[str, ...]:
    """The key at which pydantic found an error: its location without union branches and list positions."""
    parts, keys = [str(part) for part in location], []
    models: tuple[type[BaseModel], ...] = (RunConfig,)
    while parts and models:
        keys.append(parts.pop(0))
        field = next((model.model_fields[keys[-1]] for model in models if keys[-1] in model.model_fields), None)
        if field is None:
            break
        entry = _entry_of(field)
        if entry is None:
            models = tuple(_models(field.annotation))
            continue
        keys += parts[:1]
        models = tuple(_models(entry))
        parts = parts[2:]  # after the entry's name stands the kind of table that it was taken for
    return tuple(keys)


def nested_tables(field: FieldInfo) -> tuple[type[BaseModel], ...]:
    """The tables that a setting holds: its own, or those that each of its entries may be; none for a plain value."""
    entry = _entry_of(field)
    return tuple(_models(field.annotation if entry is None else entry))


def _entry_of(field: FieldInfo) -> Any:  # noqa: ANN401 - an annotation
    """What each entry of a free-form table is; None for any other setting."""
    return next((get_args(kind)[1] for kind in alternatives(field.annotation) if get_origin(kind) is dict), None)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:  # noqa: ANN401
    return (kind for kind in alternatives(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel))


def _same_name(name: str) -> list[str]:
    return [setting.key for setting in all_settings() if setting.name == name]
