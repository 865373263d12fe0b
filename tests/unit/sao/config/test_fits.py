from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.config import ConfigError, RunConfig, load_run_config
from sao.config.derived import cache_bytes, least_trainer_bytes, policy_parameters, trainer_bytes
from sao.config.doubts import doubts
from sao.config.fits import GIB, refuse_what_cannot_fit, verdict

QWEN3_30B = 30_532_122_624
EIGHT_80 = ("hardware.gpu_memory_gib=80", f"hardware.parameters={QWEN3_30B}", "hardware.engine_gpus=2")


def paper(*sets: str) -> RunConfig:
    base = ["model.path=nowhere", "hardware.gpus=none", "hardware.engines=1", *EIGHT_80]
    return load_run_config(None, [*base, *sets], {}, preset="paper-math")


def refused(config: RunConfig) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        refuse_what_cannot_fit(config)
    return caught.value.key, str(caught.value)


def doubted(config: RunConfig) -> dict[str, str]:
    return {doubt.key: doubt.text for doubt in doubts(config)}


def test_ranks_that_cannot_hold_the_optimiser_are_refused_with_the_number_that_can() -> None:
    key, text = refused(paper("trainer.ranks=6"))
    assert key == "trainer.ranks"
    # 16 bytes of the policy and 2 of the critic, over 6 ranks.
    assert f"{QWEN3_30B * 18 / 6 / GIB:.1f} GiB" in text
    assert "at least 7 ranks" in text
    refuse_what_cannot_fit(paper("trainer.ranks=7"))


def test_what_only_the_generous_estimate_exceeds_is_doubted() -> None:
    config = paper("trainer.ranks=7")
    refuse_what_cannot_fit(config)
    assert "the GPU has 80" in doubted(config)["trainer.ranks"]
    assert "trainer.ranks" not in doubted(paper("trainer.ranks=16"))


def test_a_stage_that_shards_too_little_is_told_so() -> None:
    _, text = refused(paper("trainer.ranks=8", "trainer.zero_stage=1"))
    assert "no number of ranks is enough" in text


def test_an_engine_too_small_for_its_weights_is_refused() -> None:
    key, text = refused(paper("hardware.gpu_memory_gib=40", "trainer.ranks=16", "hardware.engine_gpus=1"))
    assert key == "hardware.engine_gpus"
    assert "at least 2" in text


def test_a_cache_that_does_not_fit_beside_the_weights_is_doubted() -> None:
    config = paper("trainer.ranks=16", "hardware.engine_gpus=1", "hardware.cache_bytes_per_token=98304")
    refuse_what_cannot_fit(config)
    assert "48.0 GiB of cache" in doubted(config)["engine.max_total_tokens"]
    less = paper(
        "trainer.ranks=16",
        "rollout.concurrency=4",
        "engine.max_total_tokens=131072",
        "hardware.cache_bytes_per_token=98304",
    )
    assert "engine.max_total_tokens" not in doubted(less)


def test_a_trajectory_longer_than_an_engines_cache_is_refused() -> None:
    key, text = refused(paper("trainer.ranks=16", "engine.max_total_tokens=32767"))
    assert key == "engine.max_total_tokens"
    assert "32767 tokens of cache do not hold one trajectory of rollout.max_tokens 32768" in text
    refuse_what_cannot_fit(paper("trainer.ranks=16", "engine.max_total_tokens=32768"))


def test_an_engine_that_may_take_less_of_its_gpu_holds_less() -> None:
    half = paper("trainer.ranks=16", "hardware.engine_share=0.5", "hardware.engine_gpus=1")
    key, text = refused(half)
    assert (key, "40 GiB of each of 1 GPU(s) do not hold 56.9 GiB" in text) == ("hardware.engine_gpus", True)
    assert "at least 2" in text


@pytest.mark.parametrize("preset", ["paper-math", "paper-code", "online-writing"])
def test_each_paper_preset_says_on_what_it_fits(preset: str) -> None:
    config = load_run_config(None, [], {}, preset=preset)
    refuse_what_cannot_fit(config)
    assert verdict(config).startswith("fits 32 GPUs of 80 GiB: 16 trainer rank(s), 2 engine(s) of 8; at most 56.9 GiB")
    less = load_run_config(None, ["hardware.gpu_memory_gib=40"], {}, preset=preset)
    assert verdict(less).startswith("may not fit 32 GPUs of 40 GiB")
    assert verdict(less).endswith("see the warning of trainer.ranks")


def test_more_processes_than_gpus_are_refused() -> None:
    key, text = refused(paper("trainer.ranks=16", "hardware.gpus=19", "hardware.engines=2"))
    assert key == "hardware.gpus"
    assert "need 20" in text
    refuse_what_cannot_fit(paper("trainer.ranks=16", "hardware.gpus=20", "hardware.engines=2"))


def test_without_the_gpus_memory_nothing_is_said_about_it() -> None:
    config = paper("hardware.gpu_memory_gib=none")
    refuse_what_cannot_fit(config)
    assert verdict(config) == "whether it fits its GPUs is not known: set hardware.gpus, hardware.gpu_memory_gib"
    assert "trainer.ranks" not in doubted(config)
    assert "model.path" not in doubted(config)
    assert policy_parameters(config) == QWEN3_30B


def test_a_trainer_on_the_cpu_needs_no_gpu() -> None:
    refuse_what_cannot_fit(load_run_config(None, ["hardware.gpus=1"], {}, preset="tiny"))


def test_a_model_that_is_here_counts_itself() -> None:
    config = load_run_config(None, ["hardware.parameters=5", "hardware.gpu_memory_gib=1"], {}, preset="tiny")
    assert policy_parameters(config) != 5
    assert "hardware.parameters" in doubted(config)


def test_the_cache_follows_from_the_checkpoints_config(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 32, "hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "head_dim": 128}))
    config = paper(f"model.path={tmp_path}", "hardware.cache_bytes_per_token=1", "engine.max_total_tokens=10")
    assert cache_bytes(config) == 98_304 * 10
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert cache_bytes(config) == 98_304 // 2 * 10
    (tmp_path / "config.json").write_text("{}")
    assert cache_bytes(config) == 10


@given(stage=st.integers(0, 3), ranks=st.integers(1, 64), kl=st.sampled_from([0.0, 0.1]), frozen=st.booleans())
def test_the_least_is_never_above_the_most(stage: int, ranks: int, kl: float, frozen: bool) -> None:
    sets = [f"trainer.zero_stage={stage}", f"trainer.ranks={ranks}", f"trainer.kl_coef={kl}"]
    config = paper(*sets, *(["trainer.frozen=['norm']"] if frozen else []))
    most = trainer_bytes(config, QWEN3_30B)
    assert most is not None
    assert 0 < least_trainer_bytes(config, QWEN3_30B) <= most
