"""The laws of the training backend, on plain torch and on DeepSpeed at every ZeRO stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sao.config.schema import RunConfig
from services.trainer.backends import zero
from services.trainer.backends.base import BackendError, TrainingBackend
from services.trainer.backends.deepspeed import DeepSpeedBackend
from services.trainer.backends.torch_reference import TorchReferenceBackend
from tests.support.zero_updates import random_routes, save_small_checkpoint, states, train, trajectory, zero_config

Open = Callable[..., TrainingBackend]
TOKENS_T = torch.tensor([3, 9, 4, 4, 17, 30, 2, 8, 11])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(params=["torch", "zero-0", "zero-1", "zero-2", "zero-3"])
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(zero, "PERSISTENCE_THRESHOLD", 0)  # partition also what is as small as everything here
    kind: str = request.param
    return zero_config(int(kind[-1]) if kind.startswith("zero") else 0)


@pytest.fixture
def open_backend(request: pytest.FixtureRequest, config: RunConfig) -> Iterator[Open]:
    """Opens the kind under test; the one opened before is closed (a process holds one at a time)."""
    kind = request.node.callspec.params["config"]
    opened: list[TrainingBackend] = []

    def open_(checkpoint: Path, settings: RunConfig = config) -> TrainingBackend:
        while opened:
            opened.pop().close()
        make = TorchReferenceBackend if kind == "torch" else DeepSpeedBackend
        opened.append(make(settings, checkpoint))
        return opened[-1]

    yield open_
    for backend in opened:
        backend.close()


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def critic_pass(backend: TrainingBackend, denominator: float = 1.0) -> float:
    backend.critic_backward((backend.critic_forward(TOKENS_T) - 1.0).square().sum())
    return backend.critic_step(denominator)


def policy_pass(backend: TrainingBackend, *, scale: float = 1.0, denominator: float = 1.0) -> float:
    backend.policy_backward(-backend.policy_forward(TOKENS_T).logp_T.sum() * scale)
    return backend.policy_step(denominator)


def test_outputs_are_those_of_the_checkpoint(open_backend: Open, checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    backend = open_backend(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logp_TV = torch.log_softmax(model(input_ids=TOKENS_T[None]).logits[0], -1)
    found = backend.policy_evaluate(TOKENS_T)
    torch.testing.assert_close(found.logp_T[1:], logp_TV[:-1].gather(-1, TOKENS_T[1:, None]).squeeze(-1))
    torch.testing.assert_close(found.entropy_T[1:], -(logp_TV.exp() * logp_TV).sum(-1)[:-1])
    assert found.logp_T[0] == found.entropy_T[0] == 0.0
    torch.testing.assert_close(backend.reference_logp(TOKENS_T), found.logp_T)
    assert backend.critic_forward(TOKENS_T).tolist() == [0.0] * len(TOKENS_T), "the value head starts at zero"
    assert same(backend.policy_state(), {name: p.detach() for name, p in model.named_parameters()})


def test_routes_are_replayed_and_the_disagreement_is_told(open_backend: Open, checkpoint: Path) -> None:
    routes_TLK = random_routes(torch.Generator().manual_seed(0), len(TOKENS_T) - 1)
    expected = TorchReferenceBackend(zero_config(0), checkpoint).policy_evaluate(TOKENS_T, routes_TLK)
    backend = open_backend(checkpoint)
    own, found = backend.policy_evaluate(TOKENS_T), backend.policy_forward(TOKENS_T, routes_TLK)
    torch.testing.assert_close(found.logp_T, expected.logp_T)
    assert not torch.allclose(found.logp_T, own.logp_T, atol=1e-3)
    assert found.routing_disagreement_T is not None
    assert expected.routing_disagreement_T is not None
    assert torch.equal(found.routing_disagreement_T.isnan(), expected.routing_disagreement_T.isnan())
    assert torch.equal(found.routing_disagreement_T.nan_to_num(), expected.routing_disagreement_T.nan_to_num())
    assert own.routing_disagreement_T is None
    torch.testing.assert_close(backend.policy_evaluate(TOKENS_T).logp_T, own.logp_T, msg="routes outlived their call")


def test_the_denominator_divides_and_the_next_update_starts_afresh(open_backend: Open, checkpoint: Path) -> None:
    backend = open_backend(checkpoint)
    norms = []
    for denominator in (1.0, 8.0, 8.0):
        backend.set_lr(1e-30, 1e-30)
        backend.begin_update()
        norms.append(policy_pass(backend, denominator=denominator))
    assert norms[1] == pytest.approx(norms[0] / 8, rel=1e-4)
    assert norms[2] == pytest.approx(norms[1], rel=1e-4), "the divisor of one update reached the next"


def test_begin_update_drops_what_was_accumulated(open_backend: Open, checkpoint: Path) -> None:
    backend = open_backend(checkpoint)
    backend.set_lr(1e-30, 1e-30)
    backend.begin_update()
    clean = (policy_pass(backend), critic_pass(backend))
    backend.begin_update()
    backend.policy_backward(backend.policy_forward(TOKENS_T).logp_T.square().sum() * 50)
    backend.critic_backward((backend.critic_forward(TOKENS_T) + 9.0).square().sum())
    backend.begin_update()
    assert (policy_pass(backend), critic_pass(backend)) == pytest.approx(clean, rel=1e-5)


@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_a_non_finite_step_changes_nothing_and_leaves_nothing(
    open_backend: Open, checkpoint: Path, scale: float
) -> None:
    backend = open_backend(checkpoint)
    backend.begin_update()
    before = states(backend)
    assert not math.isfinite(policy_pass(backend, scale=scale))
    assert same(before, states(backend))
    assert math.isfinite(policy_pass(backend))
    assert not same(before, states(backend))


def test_a_restored_critic_goes_on_as_if_nothing_had_been(open_backend: Open, checkpoint: Path) -> None:
    backend = open_backend(checkpoint)
    backend.begin_update()
    critic_pass(backend)
    backend.snapshot_critic()
    at_snapshot = backend.critic_state()
    values_T = backend.critic_forward(TOKENS_T).detach()
    backend.begin_update()
    critic_pass(backend)
    once = backend.critic_state()
    backend.restore_critic()
    assert same(at_snapshot, backend.critic_state())
    backend.begin_update()
    assert torch.equal(values_T, backend.critic_forward(TOKENS_T).detach())
    critic_pass(backend)
    assert same(once, backend.critic_state()), "the optimiser's moments were not restored"


def test_a_restored_policy_goes_on_as_if_nothing_had_been(open_backend: Open, checkpoint: Path) -> None:
    backend = open_backend(checkpoint)
    backend.begin_update()
    policy_pass(backend)
    backend.snapshot_policy()
    at_snapshot = backend.policy_state()
    policy_pass(backend)
    once = backend.policy_state()
    assert not same(at_snapshot, once), "a second step within an update moves the policy too"
    backend.restore_policy()
    assert same(at_snapshot, backend.policy_state())
    policy_pass(backend)
    assert same(once, backend.policy_state()), "the optimiser's moments were not restored"


def test_an_algorithm_without_a_critic_loads_none(
    open_backend: Open, checkpoint: Path, config: RunConfig, tmp_path: Path
) -> None:
    trainer = {"algorithm": "reinforce_ma", "zero_stage": config.trainer.zero_stage, "device": "cpu"}
    backend = open_backend(checkpoint, RunConfig.model_validate({"trainer": trainer}))
    assert set(backend.parameter_names_trained()) == {"policy"}
    assert backend.critic_state() == {}
    with pytest.raises(BackendError, match=r"no critic was loaded: trainer\.algorithm has none"):
        backend.critic_forward(TOKENS_T)
    backend.begin_update()
    policy_pass(backend)
    backend.save(tmp_path)
    saved = backend.policy_state()
    policy_pass(backend)
    backend.load(tmp_path)
    assert same(saved, backend.policy_state())
    assert not list(tmp_path.glob("critic*"))


def test_restore_needs_a_snapshot(open_backend: Open, checkpoint: Path) -> None:
    with pytest.raises(BackendError, match="without a snapshot"):
        open_backend(checkpoint).restore_critic()


def test_save_then_load_continues_bit_for_bit(
    open_backend: Open, checkpoint: Path, config: RunConfig, tmp_path: Path
) -> None:
    backend = open_backend(checkpoint)
    train(backend, config, range(4))
    backend.save(tmp_path)
    random = torch.rand(3)
    stats = train(backend, config, range(4, 7))
    expected = states(backend)

    resumed = open_backend(checkpoint)
    resumed.load(tmp_path)
    assert torch.equal(torch.rand(3), random)
    again = train(resumed, config, range(4, 7))
    assert same(expected, states(resumed))
    # The window of explained variance belongs to the algorithm, not to the backend.
    assert {k: v for k, v in again.metrics.items() if k != "explained_variance"} == {
        k: v for k, v in stats.metrics.items() if k != "explained_variance"
    }
    assert not list(tmp_path.glob("*.pt"))


def test_a_save_before_the_first_step_is_a_save(
    open_backend: Open, checkpoint: Path, config: RunConfig, tmp_path: Path
) -> None:
    backend = open_backend(checkpoint)
    backend.save(tmp_path)
    train(backend, config, range(2))
    expected = states(backend)
    backend.load(tmp_path)
    train(backend, config, range(2))
    assert same(expected, states(backend))


def test_another_models_save_is_refused(open_backend: Open, checkpoint: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    backend = open_backend(checkpoint)
    backend.save(saved)
    (saved / "critic.safetensors").write_bytes((saved / "policy.safetensors").read_bytes())
    with pytest.raises(BackendError, match=r"critic.safetensors: tensor .* is (unexpected|missing)"):
        backend.load(saved)
    (saved / "policy.safetensors").write_bytes(b"torn")
    with pytest.raises(BackendError, match=r"policy.safetensors: not a readable safetensors file"):
        backend.load(saved)
    wider = open_backend(save_small_checkpoint(tmp_path / "wider", hidden=48))
    backend_dir = tmp_path / "wide-saved"
    backend_dir.mkdir()
    wider.save(backend_dir)
    with pytest.raises(BackendError, match=r"has shape .* expected"):
        open_backend(checkpoint).load(backend_dir)
    with pytest.raises(BackendError, match=r"no readable backend.json"):
        open_backend(checkpoint).load(tmp_path)


def test_names_trained_leave_out_what_is_frozen(open_backend: Open, checkpoint: Path) -> None:
    backend = open_backend(checkpoint)
    names = backend.parameter_names_trained()
    assert set(names["policy"]) == set(backend.policy_state())
    assert {name.split(".")[-2] + "." + name.split(".")[-1] for name in names["critic"]} == {
        "experts.gate_up_proj",
        "experts.down_proj",
        "head.weight",
        "head.bias",
    }


def test_an_update_reports_a_reference_kl(open_backend: Open, checkpoint: Path, config: RunConfig) -> None:
    backend = open_backend(checkpoint)
    stats = train(backend, config, range(3))
    assert stats.metrics["kl_reference"] >= 0.0
    assert len(stats.trajectories) == 3
    assert stats.trajectories[0].reward == trajectory(6).reward


def test_a_stage_may_change_between_save_and_load(checkpoint: Path, tmp_path: Path) -> None:
    saved: dict[str, Tensor] = {}
    for stage in (1, 3, 0, 2):
        config = zero_config(stage)
        backend = DeepSpeedBackend(config, checkpoint)
        try:
            if saved:
                backend.load(tmp_path)
                assert same(saved, states(backend))
            train(backend, config, range(2))
            backend.save(tmp_path)
            saved = states(backend)
        finally:
            backend.close()
