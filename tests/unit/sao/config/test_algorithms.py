"""Which settings go with which algorithm: wrong combinations are refused with the key and a reason."""

from __future__ import annotations

import tomllib
from typing import get_args

import pytest

from sao.config import ConfigError, load_run_config
from sao.config.algorithms import ALGORITHMS, AlgorithmName
from sao.config.derived import figures
from sao.config.doubts import doubts
from sao.config.dump import dump_run_config
from sao.config.load import preset_names
from sao.config.schema import RunConfig

GROUPS = [name for name, algorithm in ALGORITHMS.items() if algorithm.in_groups]


def load(*sets: str) -> RunConfig:
    return load_run_config(None, [*sets], env={}, preset="tiny")


def test_every_name_is_an_algorithm() -> None:
    assert set(get_args(AlgorithmName)) == set(ALGORITHMS)


@pytest.mark.parametrize(
    ("sets", "key", "reason"),
    [
        (("trainer.algorithm=sao", "group.size=4"), "group.size", "sao does not use it; it belongs to grpo_sync"),
        (("trainer.algorithm=sao", "ppo.clip_low=0.1"), "ppo.clip_low", "belongs to grpo_sync, grpo_async, vapo"),
        (("trainer.algorithm=grpo_dis", "ppo.minibatches=2"), "ppo.minibatches", "grpo_dis does not use it"),
        (("trainer.algorithm=spo", "moving_average.window=4"), "moving_average.window", "belongs to reinforce_ma"),
        (("trainer.algorithm=reinforce_ma", "spo.rho_min=0.5"), "spo.rho_min", "belongs to spo"),
        (("trainer.algorithm=grpo_async",), "trainer.trajectories_per_update", "no multiple of group.size 8"),
        (("trainer.algorithm=grpo_async", "group.size=3"), "trainer.trajectories_per_update", "expected 6, or another"),
        (
            ("trainer.algorithm=spo", "trainer.trajectories_per_update=1"),
            "trainer.trajectories_per_update",
            "at least 2",
        ),
        (("trainer.algorithm=spo", "trainer.advantage_norm=whiten"), "trainer.advantage_norm", "normalises"),
        (
            ("trainer.algorithm=grpo_dis", "group.size=4", "trainer.advantage_norm=whiten"),
            "trainer.advantage_norm",
            "normalises",
        ),
        (
            ("trainer.algorithm=grpo_sync", "group.size=4", "trainer.publish_every=2"),
            "trainer.publish_every",
            "waits for the weights of every update",
        ),
        (
            ("trainer.algorithm=grpo_sync", "group.size=4", "trainer.publish_min_seconds=5"),
            "trainer.publish_min_seconds",
            "waits for the weights of every update",
        ),
        (
            ("trainer.algorithm=grpo_sync", "group.size=4", "weights.mode=in_place"),
            "weights.mode",
            "samples each turn from one version",
        ),
        (("trainer.algorithm=vapo", "ppo.minibatches=3"), "ppo.minibatches", "3 x trainer.ranks 1 does not divide"),
        (
            ("trainer.algorithm=reinforce_ma", "trainer.trajectories_per_update=1", "trainer.advantage_norm=whiten"),
            "trainer.advantage_norm",
            "leaves nothing",
        ),
        (("trainer.algorithm=spo", "spo.rho_min=0.97"), "spo.rho_min", "above spo.rho_max"),
        (("trainer.algorithm=dapo",), "trainer.algorithm", "grpo_sync"),
    ],
)
def test_a_wrong_combination_is_refused_with_its_reason(sets: tuple[str, ...], key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(*sets)
    assert refusal.value.key == key
    assert reason in str(refusal.value)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_algorithm_starts_on_the_tiny_preset_and_its_run_file_reads_back_the_same(algorithm: str) -> None:
    sets = [f"trainer.algorithm={algorithm}", *(["group.size=4"] if algorithm in GROUPS else [])]
    config = load(*sets)
    assert RunConfig.model_validate(tomllib.loads(dump_run_config(config))) == config


def test_vapo_takes_one_critic_step_and_freezes_nothing_unless_told() -> None:
    config = load("trainer.algorithm=vapo")
    assert (config.critic.updates_per_policy_update, config.critic.frozen) == (1, [])
    told = load("trainer.algorithm=vapo", "critic.updates_per_policy_update=2")
    assert (told.critic.updates_per_policy_update, told.critic.frozen) == (2, [])
    assert load().critic.updates_per_policy_update == 2


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_leaves_vapo_its_own_critic(preset: str) -> None:
    sao = load_run_config(None, [], env={}, preset=preset).critic
    vapo = load_run_config(None, ["trainer.algorithm=vapo"], env={}, preset=preset).critic
    assert (sao.updates_per_policy_update, vapo.updates_per_policy_update, vapo.frozen) == (2, 1, [])


def test_a_deadline_of_groups_that_is_shorter_than_an_episode_is_doubted() -> None:
    sets = ["trainer.algorithm=grpo_async"]
    hasty = load_run_config(None, sets, env={}, preset="paper-math")
    patient = load_run_config(None, [*sets, "group.timeout_s=9600.0"], env={}, preset="paper-math")
    assert "9600 s" in {doubt.key: doubt.text for doubt in doubts(hasty)}["group.timeout_s"]
    assert "group.timeout_s" not in {doubt.key for doubt in doubts(patient)}


def test_only_groups_want_several_rollouts_of_a_prompt() -> None:
    for name in ALGORITHMS:
        sets = [f"trainer.algorithm={name}", *(["group.size=4"] if name in GROUPS else [])]
        assert load(*sets).samples == (4 if name in GROUPS else 1)


def test_synchronous_training_admits_one_update_at_a_time() -> None:
    config = load("trainer.algorithm=grpo_sync", "group.size=4", "trainer.trajectories_per_update=8")
    assert config.admission_limit == 8


def test_settings_that_the_algorithm_has_no_part_for_are_named() -> None:
    found = {doubt.key: doubt.text for doubt in doubts(load("trainer.algorithm=grpo_async", "group.size=4"))}
    assert found["critic.lr"] == "not used: grpo_async has no critic"
    assert found["trainer.eps_high"] == "not used: grpo_async clips by [ppo]"
    assert not {"critic.lr", "trainer.eps_high"} & {doubt.key for doubt in doubts(load())}


def test_each_setting_without_a_part_is_named_not_only_the_first_of_its_section() -> None:
    sets = ("trainer.algorithm=spo", "critic.warmup_updates=3", "trainer.alpha=2.0", "guards.explained_variance=0.1")
    named = {doubt.key for doubt in doubts(load(*sets)) if doubt.text == "not used: spo has no critic"}
    of_the_preset = {"critic.lr", "critic.pretrain_trajectories", "critic.pretrain_explained_variance"}
    assert named == of_the_preset | {"critic.warmup_updates", "trainer.alpha", "guards.explained_variance"}


def test_without_a_critic_there_is_nothing_to_train_first() -> None:
    first = {"critic pre-training", "critic warm-up"}
    assert first <= {figure.name for figure in figures(load())}
    assert not first & {figure.name for figure in figures(load("trainer.algorithm=reinforce_ma"))}
