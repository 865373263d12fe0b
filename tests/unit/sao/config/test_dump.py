from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from sao.config import RunConfig, dump_run_config, load_run_config, secret_environment
from sao.config.dump import without_password
from sao.config.keys import Setting, all_settings, alternatives, nested_tables
from sao.config.load import preset_names

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)


def values(kind: Any) -> st.SearchStrategy[object]:
    """Anything that a run file may hold for a field of this type, in and out of range."""
    origin = get_origin(kind)
    if origin is list:
        return st.lists(TEXT, max_size=3)
    if origin is tuple:
        return st.tuples(st.floats(0, 1), st.floats(0, 1)).map(list)
    if origin is not None:
        return st.sampled_from(get_args(kind))
    by_type: dict[type, st.SearchStrategy[object]] = {
        bool: st.booleans(),
        int: st.integers(0, 300),
        float: st.floats(0, 100) | st.floats(0, 1) | st.integers(0, 5),
        str: TEXT,
        Path: TEXT,
    }
    return by_type[kind]


def value_of(setting: Setting) -> st.SearchStrategy[object]:
    kinds = [kind for kind in alternatives(setting.field.annotation) if kind is not type(None)]
    return st.one_of([values(kind) for kind in kinds])


PLAIN = [
    s
    for s in all_settings()
    if not (s.secret or nested_tables(s.field)) and s.section not in {"preference", "sampling"} and s.key != "redis.url"
]


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """A valid configuration with any of the settings at any valid value."""
    tables: dict[str, dict[str, object]] = {}
    config = RunConfig()
    for setting in draw(st.lists(st.sampled_from(PLAIN), max_size=12, unique_by=lambda s: s.key)):
        before = dict(tables.get(setting.section, {}))
        tables.setdefault(setting.section, {})[setting.name] = draw(value_of(setting))
        try:
            config = RunConfig.model_validate(tables)
        except ValidationError:
            tables[setting.section] = before
    return config


@settings(max_examples=150, deadline=None)
@given(configs())
def test_what_is_written_reads_back_the_same(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    path.write_text(dump_run_config(config), encoding="utf-8", newline="")
    assert load_run_config(path, env={}) == config


def test_a_table_within_a_table_reads_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[reward.bounds]\nweight = 2.5\n", encoding="utf-8")
    config = load_run_config(path, ["reward.bounds.offset=3"], env={"SAO__REWARD__BOUNDS__REWARD": "4"})
    assert (config.reward.bounds.weight, config.reward.bounds.offset, config.reward.bounds.reward) == (2.5, 3.0, 4.0)
    path.write_text(dump_run_config(config), encoding="utf-8")
    assert load_run_config(path, env={}) == config


@pytest.mark.parametrize("name", preset_names())
def test_presets_round_trip(name: str, tmp_path: Path) -> None:
    config = load_run_config(env={}, preset=name)
    path = tmp_path / "run.toml"
    path.write_text(dump_run_config(config), encoding="utf-8")
    again = load_run_config(path, env={})
    assert again == config
    assert dump_run_config(again) == dump_run_config(config)


@given(
    name=TEXT.filter(lambda text: len(text) <= 64),
    weights=st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True), st.floats(-9, 9), min_size=1),
    offset=st.floats(-1, 1) | st.integers(-1, 1),
)
def test_a_preference_round_trips(
    tmp_path_factory: pytest.TempPathFactory, name: str, weights: dict[str, float], offset: float
) -> None:
    document = {"name": name, "weights": weights, "offset": offset, "gates": list(weights)[:1]}
    config = RunConfig.model_validate({"preference": document})
    path = tmp_path_factory.getbasetemp() / "preference.toml"
    path.write_text(dump_run_config(config), encoding="utf-8", newline="")
    assert load_run_config(path, env={}) == config


SECRETS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=40).map(
    lambda text: f"§{text}§"
)


@given(token=SECRETS, api=SECRETS, admin=SECRETS, password=st.from_regex(r"[a-z0-9]{12}", fullmatch=True))
def test_no_secret_is_written_and_the_environment_brings_them_back(
    tmp_path_factory: pytest.TempPathFactory, token: str, api: str, admin: str, password: str
) -> None:
    config = RunConfig.model_validate(
        {
            "auth": {"token": token},
            "engine": {"api_key": api, "admin_key": admin},
            "redis": {"url": f"redis://user:{password}@store:6380/2"},
        }
    )
    text = dump_run_config(config)
    assert not [secret for secret in (token, api, admin, password) if secret in text]
    path = tmp_path_factory.getbasetemp() / "secrets.toml"
    path.write_text(text, encoding="utf-8")
    assert load_run_config(path, env=secret_environment(config)) == config
    without = load_run_config(path, env={})
    assert without.auth.token is None
    assert without.redis.url == "redis://store:6380/2"


def test_every_secret_setting_is_carried() -> None:
    """A secret that is added to the schema later travels too."""
    tables: dict[str, dict[str, object]] = {}
    for setting in all_settings():
        if setting.secret:
            tables.setdefault(setting.section, {})[setting.name] = SecretStr("x")
    carried = secret_environment(RunConfig.model_validate(tables))
    assert len(carried) == sum(len(section) for section in tables.values()) >= 3


def test_a_child_that_gets_the_file_and_the_secrets_has_the_same_configuration(tmp_path: Path) -> None:
    env = {"PATH": "/bin", "SAO__TRAINER__MAX_LAG": "5", "SAO__AUTH__TOKEN": "t0ken"}
    config = load_run_config(None, ["trainer.max_lag=7"], env)
    assert secret_environment(config) == {"SAO__AUTH__TOKEN": "t0ken"}
    path = tmp_path / "run.toml"
    path.write_text(dump_run_config(config), encoding="utf-8")
    assert load_run_config(path, env=secret_environment(config)) == config


def test_without_secrets_the_environment_stays_empty() -> None:
    assert secret_environment(RunConfig()) == {}


@pytest.mark.parametrize(
    ("url", "written"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("rediss://:pw@h:1/0?x=1", "rediss://h:1/0?x=1"),
        ("redis://u:p@[::1]:1/0", "redis://[::1]:1/0"),
        ("unix:///run/valkey.sock", "unix:///run/valkey.sock"),
    ],
)
def test_only_the_password_part_goes(url: str, written: str) -> None:
    assert without_password(url) == written
