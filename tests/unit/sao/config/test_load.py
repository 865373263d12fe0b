from __future__ import annotations

from pathlib import Path

import pytest

from sao.config import ConfigError, load_run_config
from sao.config.load import preset_names


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def refused(text: str, run_file: Path, sets: tuple[str, ...] = (), env: dict[str, str] | None = None) -> ConfigError:
    run_file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_run_config(run_file, sets, env or {})
    return caught.value


def test_the_order_is_defaults_preset_file_environment_set(run_file: Path) -> None:
    run_file.write_text('preset = "tiny"\n[trainer]\nmax_lag = 5\nkl_coef = 0.1\npublish_every = 2\n')
    config = load_run_config(
        run_file,
        ["trainer.publish_every=3"],
        {"SAO__TRAINER__KL_COEF": "0.2", "SAO__TRAINER__PUBLISH_EVERY": "4", "OTHER__TRAINER__LR": "9"},
    )
    trainer = config.trainer
    assert (trainer.gamma, trainer.trajectories_per_update) == (1.0, 4)
    assert (trainer.max_lag, trainer.kl_coef, trainer.publish_every) == (5, 0.2, 3)


def test_nothing_given_is_the_defaults() -> None:
    assert load_run_config(env={}) == load_run_config(env={"PATH": "/bin"})


@pytest.mark.parametrize(
    ("text", "key", "part"),
    [
        ("[trainer]\nlrr = 1.0", "trainer.lrr", "unknown key; did you mean trainer.lr?"),
        ("[trainr]\nlr = 1.0", "trainr", "did you mean trainer?"),
        ("[zzz]\nzzz = 1.0", "zzz", "the sections are run, redis,"),
        ("max_lag = 3", "max_lag", "did you mean trainer.max_lag?"),
        ("trainer = 4", "trainer", "expected a table, [trainer]"),
        ("[trainer]\nlr = -1.0", "trainer.lr", "greater than 0 or Input should be 'auto'; found -1.0"),
        ('[trainer]\nlr = "fast"', "trainer.lr", "found 'fast'"),
        ("[trainer]\nbetas = [0.9]", "trainer.betas", "required"),
        ("[trainer]\nbetas = [0.9, 2.0]", "trainer.betas", "less than or equal to 1; found 2.0"),
        ("[trainer]\nranks = true", "trainer.ranks", "valid integer; found True"),
        ('[trainer]\nranks = "2"', "trainer.ranks", "valid integer; found '2'"),
        ("[trainer]\nmax_lag = 1\npublish_every = 3", "trainer.publish_every", "max_lag + 1 = 2"),
        ("[trainer]\nkl_coef = nan", "trainer.kl_coef", "found nan"),
        ("[sampling]\ntop_p = 0.9", "sampling.top_p", "found 0.9"),
        ("[sampling]\ntemperature = 0.7", "sampling.temperature", "found 0.7"),
        ('[model]\npath = "m"\nlayers = 3', "model.layers", "model.path names a checkpoint"),
        ('[run]\nname = "Not OK"', "run.name", "found 'Not OK'"),
        ('[engine]\nurls = ["http://a", 3]', "engine.urls", "found 3"),
        ('[engine]\ndns = "engines:30000"', "engine.dns", "engine.discovery is static"),
        ('[engine]\ndiscovery = "dns"', "engine.dns", "expected name:port, found ''"),
        ('[engine]\ndiscovery = "dns"\ndns = "http://engines:1"', "engine.dns", "expected name:port"),
        ('[engine]\ndiscovery = "dns"\ndns = "engines:1"\nurls = ["http://a"]', "engine.urls", "expected none"),
        ('[preference]\nname = "p"\nweights = { good = "x" }', "preference.weights.good", "found 'x'"),
        ('[preference]\nname = "p"\nweights = { good = 1 }\nlow = 2', "preference", "low 2"),
        ('preset = "huge"', "preset", "there are online-writing, paper-code"),
        ("preset = 3", "preset", "found 3"),
        ("[run", "run.toml", "not TOML"),
    ],
)
def test_a_wrong_setting_names_its_key_and_what_was_found(run_file: Path, text: str, key: str, part: str) -> None:
    error = refused(text, run_file)
    assert error.key.removeprefix(f"{run_file.parent}/") == key
    assert str(error).startswith(f"{error.key}: ")
    assert part in str(error)


def test_the_other_wrong_settings_are_named_too(run_file: Path) -> None:
    error = refused("[trainer]\nlr = -1.0\n[critic]\nlr = 0.0", run_file)
    assert error.key == "trainer.lr"
    assert "(also wrong: critic.lr)" in str(error)


def test_a_file_that_cannot_be_read_is_named(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml: cannot read the run file: No such file"):
        load_run_config(run_file, env={})
    run_file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"run\.toml: not UTF-8"):
        load_run_config(run_file, env={})


def test_secrets_are_not_repeated_in_errors(run_file: Path) -> None:
    for text in ("[auth]\ntoken = 918273645", "auth = 918273645"):
        error = refused(text, run_file)
        assert error.key.startswith("auth")
        assert "918273645" not in str(error)


def test_two_different_presets_are_refused(run_file: Path) -> None:
    run_file.write_text('preset = "tiny"')
    assert load_run_config(run_file, env={}, preset="tiny").task.name == "calculator"
    with pytest.raises(ConfigError, match="preset: the run file says 'tiny', the command line 'tiny-writing'"):
        load_run_config(run_file, env={}, preset="tiny-writing")


def test_a_preference_is_replaced_whole(run_file: Path) -> None:
    run_file.write_text('[preference]\nname = "p"\nweights = { quality = 1.0 }\n')
    config = load_run_config(run_file, ["preference.weights.cute=2.0"], {})
    assert config.preference is not None
    assert config.preference.weights == {"quality": 1.0, "cute": 2.0}


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads(name: str) -> None:
    assert load_run_config(env={}, preset=name) != load_run_config(env={})
