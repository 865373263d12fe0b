from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sao.config import ConfigError, RunConfig, load_run_config


def with_set(*sets: str) -> RunConfig:
    return load_run_config(None, sets, {})


def test_values_are_written_as_in_toml() -> None:
    config = with_set(
        "trainer.ranks=2",
        "trainer.kl_coef=0.5",
        "redis.embedded=true",
        'engine.urls=["http://a", "http://b"]',
        "trainer.betas=[0.8, 0.9]",
        "run.dir=somewhere/else",
        "trainer.lr=auto",
    )
    assert (config.trainer.ranks, config.trainer.kl_coef, config.redis.embedded) == (2, 0.5, True)
    assert config.engine.urls == ["http://a", "http://b"]
    assert config.trainer.betas == (0.8, 0.9)
    assert str(config.run.dir) == "somewhere/else"
    assert config.trainer.lr == "auto"


def test_text_needs_no_quotes_even_when_it_looks_like_a_number() -> None:
    assert with_set("run.name=123").run.name == "123"
    assert with_set("run.name=2026-01-01").run.name == "2026-01-01"
    assert with_set('run.name="quoted"').run.name == "quoted"
    assert with_set("task.name=my.package:Task").task.name == "my.package:Task"
    assert with_set("rollout.worker_id=a=b").rollout.worker_id == "a=b"


@example("none")
@example("123")
@example('"quoted"')
@given(st.text(st.characters(min_codepoint=32, max_codepoint=1000), min_size=1))
def test_a_secret_is_taken_character_for_character(secret: str) -> None:
    token = load_run_config(env={"SAO__AUTH__TOKEN": secret}).auth.token
    assert token is not None
    assert token.get_secret_value() == secret


def test_none_removes_what_may_be_absent() -> None:
    assert load_run_config(None, ["run.updates=none"], {}, preset="tiny").run.updates is None
    with pytest.raises(ConfigError, match=r"trainer\.ranks"):
        with_set("trainer.ranks=none")


def test_a_later_set_wins() -> None:
    assert with_set("trainer.ranks=2", "trainer.ranks=3").trainer.ranks == 3


@pytest.mark.parametrize(
    ("item", "key", "part"),
    [
        ("trainer.lrr=1", "trainer.lrr", "unknown key (--set); did you mean trainer.lr?"),
        ("max_lag=1", "max_lag", "did you mean trainer.max_lag?"),
        ("nowhere.x=1", "nowhere.x", "the sections are run, redis"),
        ("trainer=1", "trainer", "is a table; name one of its keys: algorithm,"),
        ("trainer.lr.x=1", "trainer.lr.x", "trainer.lr is a value, not a table"),
        ("trainer.lr", "trainer.lr", "expected section.key=value"),
        ("=1", "=1", "expected section.key=value"),
        ("trainer.ranks=many", "trainer.ranks", "found 'many'"),
        ("redis.embedded=yes", "redis.embedded", "valid boolean; found 'yes'"),
    ],
)
def test_a_wrong_set_names_its_key(item: str, key: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_set(item)
    assert caught.value.key == key
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "key"),
    [
        ("SAO__NOWHERE__X", "nowhere.x"),
        ("SAO__TRAINER__LRR", "trainer.lrr"),
        ("SAO__TRAINER", "trainer"),
        ("SAO__TRAINER__RANKS", "trainer.ranks"),
    ],
)
def test_a_wrong_variable_names_its_key(variable: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(env={variable: "x"})
    assert caught.value.key == key
    if key != "trainer.ranks":
        assert variable in str(caught.value)
