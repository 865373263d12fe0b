"""Read a run file: defaults < the file's `preset` < the file < environment < `--set`."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sao.config.schema import RunConfig


class ConfigError(ValueError):
    """A setting is wrong: `key` names it, the message says what was found and what is expected."""

    def __init__(self, key: str, message: str) -> None:
        self.key = key
        super().__init__(f"{key}: {message}")


def preset_names() -> list[str]:
    """The presets that come with sao."""
    folder = resources.files("sao.config") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_preset(name: str) -> dict[str, Any]:
    """A preset's tables; ConfigError when there is none of that name."""
    if name not in preset_names():
        raise ConfigError("preset", f"no preset {name!r}; there are {', '.join(preset_names())}")
    return tomllib.loads((resources.files("sao.config") / "presets" / f"{name}.toml").read_text())


def load_run_config(
    path: Path | None = None,
    sets: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    preset: str | None = None,
) -> RunConfig:
    """The effective configuration; ConfigError names the first wrong key."""
    tables: dict[str, Any] = {}
    if path is not None:
        tables = _read(path)
    base = tables.pop("preset", None) or preset
    if base is not None:
        tables = _merged(load_preset(base), tables)
    for key, text in sorted((os.environ if env is None else env).items()):
        if key.startswith("SAO__"):
            _assign(tables, key.removeprefix("SAO__").lower().split("__"), text, origin=f"environment {key}")
    for item in sets:
        dotted, separator, text = item.partition("=")
        if not separator:
            raise ConfigError(item, "expected --set section.key=value")
        _assign(tables, dotted.strip().split("."), text, origin=f"--set {item}")
    try:
        return RunConfig.model_validate(tables)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "run file"
        message = "unknown key" if first["type"] == "extra_forbidden" else f"{first['msg']}; found {first['input']!r}"
        raise ConfigError(key, message) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(str(path), f"cannot read the run file: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), f"not TOML: {error}") from error


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), dict):
            result[key] = _merged(result[key], value)
        else:
            result[key] = value
    return result


def _assign(tables: dict[str, Any], keys: list[str], text: str, *, origin: str) -> None:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    table = tables
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(".".join(keys), f"{key!r} is a value, not a table ({origin})")
    table[keys[-1]] = value
