"""Write an effective configuration so that another process reads back exactly the same, without its secrets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import tomli_w
from pydantic import BaseModel, SecretStr

from sao.config.keys import all_settings, section_of
from sao.config.overrides import ENVIRONMENT_PREFIX
from sao.config.schema import ModelSection, RunConfig

HEADER = "# Effective configuration, written by sao. Secrets are not here: they are passed by the environment.\n\n"
_SHAPE = set(ModelSection.model_fields) - {"path"}


def dump_run_config(config: RunConfig) -> str:
    """The TOML of every value in force; `load_run_config` of it, given `secret_environment`, equals `config`.

    Left out: secrets, a password in redis.url, what is none, and the tiny model's shape when model.path is set.
    """
    tables = {name: _plain(dict(section)) for name, section in config if section is not None}
    if config.model.path is not None:
        tables["model"] = {key: value for key, value in tables["model"].items() if key not in _SHAPE}
    tables["redis"]["url"] = without_password(config.redis.url)
    return HEADER + tomli_w.dumps(tables)


def secret_environment(config: RunConfig) -> dict[str, str]:
    """The SAO__SECTION__KEY variables that carry what `dump_run_config` leaves out, for child processes.

    Give a child these and no other SAO__ variable: those would win over the file, and so over a --set.
    """
    secrets: dict[str, str] = {}
    for setting in all_settings():
        value = getattr(section_of(config, setting.section), setting.name, None)
        if setting.secret and isinstance(value, SecretStr):
            secrets[_variable(setting.section, setting.name)] = value.get_secret_value()
    if without_password(config.redis.url) != config.redis.url:
        secrets[_variable("redis", "url")] = config.redis.url
    return secrets


def without_password(url: str) -> str:
    """The URL with user and password removed, when it has a password."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _variable(section: str, key: str) -> str:
    return ENVIRONMENT_PREFIX + "__".join((*section.upper().split("."), key.upper()))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _plain_value(value)
        for key, value in values.items()
        if value is not None and not isinstance(value, SecretStr)
    }


def _plain_value(value: Any) -> Any:  # noqa: ANN401 - whatever a setting holds
    if isinstance(value, BaseModel):
        return _plain(dict(value))
    if isinstance(value, Mapping):
        return _plain(value)
    return str(value) if isinstance(value, Path) else value
