from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.config import RunConfig, load_run_config
from sao.config.derived import MIB, expected_lag, figures, largest_lag, payload_bytes, redis_bytes, trainer_bytes
from sao.config.doubts import doubts
from sao.config.load import preset_names
from sao.config.model_size import checkpoint_parameters, tiny_parameters
from sao.config.schema import ModelSection
from sao.v1 import trajectory_pb2 as pb


def configured(*sets: str, preset: str | None = None) -> RunConfig:
    return load_run_config(None, sets, {}, preset=preset)


def test_the_tiny_preset_is_the_measured_setting() -> None:
    config = configured(preset="tiny")
    by_name = {figure.name: figure.value for figure in figures(config)}
    assert by_name["policy learning rate"] == pytest.approx(3e-4)
    assert by_name["admission limit"] == 20
    assert configured("trainer.trajectories_per_update=1", preset="tiny").trainer.policy_lr == pytest.approx(1e-4)
    assert configured("trainer.trajectories_per_update=64", preset="tiny").trainer.policy_lr == pytest.approx(3e-4)


def test_a_window_that_the_ranks_never_fill_is_doubted() -> None:
    def doubted(*sets: str) -> bool:
        return "critic.pretrain_trajectories" in {doubt.key for doubt in doubts(configured(*sets))}

    assert doubted("trainer.ranks=8", "critic.pretrain_trajectories=500")
    assert not doubted("trainer.ranks=8", "critic.pretrain_trajectories=512")
    assert not doubted("trainer.ranks=8", "critic.pretrain_trajectories=0")


def test_guards_that_never_judge_are_doubted() -> None:
    def doubted(*sets: str) -> bool:
        return "guards.window" in {doubt.key for doubt in doubts(configured(*sets))}

    assert doubted("run.updates=49")
    assert not doubted("run.updates=50")
    assert not doubted()


@given(
    per_update=st.integers(1, 200),
    max_lag=st.integers(0, 20),
    publish_every=st.integers(1, 21),
    slots=st.integers(1, 300),
)
def test_under_drop_nothing_that_is_admitted_needs_to_be_stale(
    per_update: int, max_lag: int, publish_every: int, slots: int
) -> None:
    """The admission limit is the largest that keeps the oldest work within max_lag."""
    publish_every = min(publish_every, max_lag + 1)
    config = configured(
        "trainer.stale_policy=drop",
        f"trainer.trajectories_per_update={per_update}",
        f"trainer.max_lag={max_lag}",
        f"trainer.publish_every={publish_every}",
        f"rollout.concurrency={slots}",
    )
    assert largest_lag(config) == max_lag
    assert expected_lag(config) <= max(max_lag, (max_lag + 2) / 2)


def longest(config: RunConfig) -> pb.Trajectory:
    """A trajectory of max_tokens with the largest ids there are."""
    tokens = config.rollout.max_tokens
    segment = pb.Segment(kind=pb.SEGMENT_KIND_ACTION, token_ids=[2**32 - 1] * tokens, logprobs=[-0.1] * tokens)
    segment.versions.add(version="v00000001", start=0, end=tokens)
    return pb.Trajectory(id="0" * 36, run="run", task="calculator", segments=[segment], task_payload_json="{}" * 200)


@given(st.integers(1, 50_000))
def test_the_payload_bound_holds_for_a_real_message(max_tokens: int) -> None:
    config = configured(f"rollout.max_tokens={max_tokens}")
    assert longest(config).ByteSize() <= payload_bytes(config)


def test_redis_holds_admitted_and_unacknowledged_and_dead_work() -> None:
    config = configured("checkpoint.every_updates=2", preset="tiny")
    dead = config.redis.dead_letters_mb * MIB
    assert redis_bytes(config) == dead + (20 + 2 * 4) * payload_bytes(config)
    bounded = configured("checkpoint.every_updates=1000000", "checkpoint.unacked_mb_max=1", preset="tiny")
    assert redis_bytes(bounded) == dead + MIB + (20 + 4) * payload_bytes(bounded)


def test_zero_shards_the_optimiser_then_gradients_then_weights() -> None:
    def per_parameter(stage: int) -> float:
        config = configured(f"trainer.zero_stage={stage}", "trainer.ranks=4", "trainer.dtype=float32")
        size = trainer_bytes(config, 1_000_000)
        assert size is not None
        return size / 2_000_000

    assert [per_parameter(stage) for stage in range(4)] == [16, 8 + 8 / 4, 4 + 12 / 4, 16 / 4]


def test_the_reference_policy_costs_its_weights() -> None:
    without, with_kl = (trainer_bytes(configured(f"trainer.kl_coef={kl}"), 100) for kl in (0.0, 0.1))
    assert without is not None
    assert with_kl == without + 400


def test_the_tiny_count_is_near_the_measured_one() -> None:
    """0.225-0.231 M with tied embeddings over 32-128 rows; ours are untied."""
    assert 0.225e6 < tiny_parameters(ModelSection()) < 0.25e6


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_a_checkpoint_is_counted_from_its_headers(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": [3, 4], "b": [5]})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"c": [2, 2, 2], "scalar": []})
    assert checkpoint_parameters(tmp_path) == 12 + 5 + 8 + 1


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 64, header(b"nope"), header(b"{}", 99), header(b"[]"), header(b'{"a": 1}'), header(b'{"a": {}}')],
)
def test_a_file_that_is_no_checkpoint_counts_as_unknown(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert checkpoint_parameters(tmp_path) is None
    assert checkpoint_parameters(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (["trainer.max_lag=9"], "trainer.max_lag"),
        (["rollout.concurrency=40"], "rollout.concurrency"),
        (["trainer.stale_policy=drop", "rollout.concurrency=21"], "rollout.concurrency"),
        (["trainer.kl_coef=0.0"], "trainer.kl_coef"),
        (["engine.dtype=bfloat16"], "engine.dtype"),
        (["engine.dtype=bfloat16"], "weights.canary_tolerance"),
        (["model.path=nowhere"], "model.path"),
        (["rollout.max_tokens=200000"], "ingest.max_tokens"),
        (["rollout.max_tokens=200000", "ingest.max_message_mb=1"], "ingest.max_message_mb"),
        (["redis.maxmemory_mb=1", "rollout.max_tokens=9000"], "redis.maxmemory_mb"),
        (["engine.max_running_requests=4"], "engine.max_running_requests"),
        (["engine.max_total_tokens=700"], "engine.max_total_tokens"),
        (["ingest.episode_deadline_s=100.0"], "ingest.episode_deadline_s"),
        (["reward.claim_idle_s=5.0"], "reward.claim_idle_s"),
        (["weights.bind=0.0.0.0"], "auth.token"),
    ],
)
def test_each_doubt_is_raised_by_its_setting_alone(sets: list[str], key: str) -> None:
    assert [doubt.key for doubt in doubts(configured(preset="tiny"))] == []
    assert key in [doubt.key for doubt in doubts(configured(*sets, preset="tiny"))]


@pytest.mark.parametrize("name", preset_names())
def test_presets_raise_no_doubt_but_that_the_checkpoint_is_yours_to_bring(name: str) -> None:
    found = [doubt.key for doubt in doubts(configured(preset=name))]
    assert found in ([], ["model.path"])


def test_an_update_that_the_archive_cannot_write_is_doubted(tmp_path: Path) -> None:
    """With the routes of a large mixture of experts; 128 trajectories of 32768 tokens without them are far from it."""
    model = {"model_type": "moe", "num_hidden_layers": 64, "num_experts": 128, "num_experts_per_tok": 8}
    (tmp_path / "config.json").write_text(json.dumps(model | {"vocab_size": 8}))

    def doubted(*sets: str) -> bool:
        found = doubts(configured(f'model.path="{tmp_path}"', *sets, preset="paper-math"))
        return "trainer.trajectories_per_update" in {doubt.key for doubt in found}

    assert doubted("trainer.routing_replay=true")
    assert not doubted("trainer.routing_replay=false")


def test_a_token_settles_exposure() -> None:
    config = load_run_config(None, ["ingest.bind=0.0.0.0"], {"SAO__AUTH__TOKEN": "secret"}, preset="tiny")
    assert doubts(config) == []


def test_what_waits_for_feedback_takes_memory_and_is_in_time_for_max_lag_updates() -> None:
    plain = configured(preset="tiny")
    asking = configured("reward.feedback.waiting_max=7", "reward.feedback.deadline_s=60.0", preset="tiny")
    assert redis_bytes(asking) - redis_bytes(plain) == 7 * payload_bytes(asking)
    shown = {figure.name: figure for figure in figures(asking)}
    assert shown["feedback in time"].value == asking.trainer.max_lag
    assert "feedback in time" not in {figure.name for figure in figures(plain)}


def test_feedback_that_a_group_does_not_wait_for_is_doubted() -> None:
    def doubted(*sets: str) -> bool:
        return "reward.feedback.deadline_s" in {doubt.key for doubt in doubts(configured(*sets))}

    group = (
        "trainer.algorithm=grpo_async",
        "trainer.trajectories_per_update=4",
        "group.size=4",
        "group.timeout_s=100.0",
    )
    assert doubted(*group, "reward.feedback.deadline_s=101.0")
    assert not doubted(*group, "reward.feedback.deadline_s=100.0")
    assert not doubted("reward.feedback.deadline_s=9999.0")
