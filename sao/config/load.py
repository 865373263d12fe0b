"""Read a run file: defaults < preset < the file < environment < `--set`."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sao.config import keys as schema_keys
from sao.config.errors import ConfigError
from sao.config.overrides import apply_environment, apply_sets
from sao.config.schema import SETTING_ERROR, RunConfig

__all__ = ["ConfigError", "load_preset", "load_run_config", "preset_names"]


def preset_names() -> list[str]:
    """The presets that come with sao."""
    folder = resources.files("sao.config") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_preset(name: str) -> dict[str, Any]:
    """A preset's tables; ConfigError when there is none of that name."""
    if name not in preset_names():
        raise ConfigError(key="preset", message=f"no preset {name!r}; there are {', '.join(preset_names())}")
    return tomllib.loads((resources.files("sao.config") / "presets" / f"{name}.toml").read_text(encoding="utf-8"))


def load_run_config(
    path: Path | None = None,
    sets: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    preset: str | None = None,
) -> RunConfig:
    """The effective configuration.

    The preset is the file's top-level `preset` or the argument. `env` defaults to the process's environment; only its
    SAO__SECTION__KEY variables count. ConfigError names the first wrong key, and the others in its message.
    """
    tables: dict[str, Any] = {} if path is None else _read(path)
    base = _preset_name(tables.pop("preset", None), preset)
    if base is not None:
        tables = _merged(load_preset(base), tables)
    apply_environment(tables, os.environ if env is None else env)
    apply_sets(tables, sets)
    try:
        return RunConfig.model_validate(tables)
    except ValidationError as error:
        raise _config_error(error.errors()) from None


def _preset_name(in_file: object, asked: str | None) -> str | None:
    if in_file is None:
        return asked
    if not isinstance(in_file, str):
        raise ConfigError(key="preset", message=f"expected the name of a preset, found {in_file!r}")
    if asked not in {None, in_file}:
        raise ConfigError(
            key="preset", message=f"the run file says {in_file!r}, the command line {asked!r}; remove one of them"
        )
    return in_file


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot read the run file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"not UTF-8 text: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), f"not TOML: {error}") from error


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        # A preference is one document: mixing the weights of two would make a third that nobody wrote.
        if isinstance(value, Mapping) and isinstance(below, Mapping) and key != "preference":
            result[key] = _merged(below, value)
        else:
            result[key] = value
    return result


def _config_error(errors: Sequence[ErrorDetails]) -> ConfigError:
    texts: dict[str, list[str]] = {}
    for error in errors:
        key, text = _described(error)
        texts.setdefault(key, []).append(text)
    (first, of_first), *others = texts.items()
    message = " or ".join(dict.fromkeys(of_first))
    found = next((_found(error) for error in errors if _described(error)[0] == first), "")
    also = f" (also wrong: {', '.join(key for key, _ in others)})" if others else ""
    return ConfigError(first, f"{message}{found}{also}")


def _described(error: ErrorDetails) -> tuple[str, str]:
    keys = schema_keys.dotted(error["loc"])
    match error["type"]:
        case "extra_forbidden":
            return ".".join(keys), f"unknown key{schema_keys.suggestion(keys)}"
        case "model_type" | "model_attributes_type":
            return ".".join(keys), f"expected a table, [{'.'.join(keys)}] with key = value lines below it"
        case str(kind) if kind == SETTING_ERROR:
            return ".".join((*keys, error["ctx"]["key"])), error["msg"]
        case "value_error":
            return ".".join(keys), error["msg"].removeprefix("Value error, ")
        case _:
            return ".".join(keys), error["msg"]


def _found(error: ErrorDetails) -> str:
    """`; found ...`, where the value is small, adds something, and is no secret."""
    if error["type"] in {"extra_forbidden", "missing", SETTING_ERROR} or isinstance(error["input"], Mapping):
        return ""
    key = ".".join(schema_keys.dotted(error["loc"]))
    secret = any(setting.secret and key in {setting.key, setting.section} for setting in schema_keys.all_settings())
    return "" if secret else f"; found {error['input']!r}"
