"""At every ZeRO stage, B trajectories one by one do what one padded batch of them does: weights to 1e-6 in float32.

Why that bar means something:
- One step moves weights by 2e-3, two thousand times as far, and one trajectory of 32 more or less by over 1e-4.
- AdamW's first step is the sign of the gradient, at any size: it multiplies the rounding of gradients near zero, and
  hides a wrong size. Therefore all start from moments that three earlier updates left; then weights follow the
  gradient's size, rounding stays at the 1e-7 of a weight near 1, and there is no luck in passing.
- Clipping hides a wrong divisor. Therefore the norms before clipping are compared too, to 1e-5 of themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sao.config.schema import RunConfig
from services.trainer.backends import zero
from services.trainer.backends.base import TrainingBackend
from services.trainer.backends.deepspeed import DeepSpeedBackend
from services.trainer.backends.paired import optimizer_options
from services.trainer.backends.torch_reference import TorchReferenceBackend
from services.trainer.core.update import TrajectoryTensors, Update, UpdateSettings
from tests.support.one_batch_training import (
    Norms,
    OneBatchTrainer,
    PaddedCritic,
    PaddedPolicy,
    every_fate,
    one_by_one,
    uneven_trajectories,
)
from tests.support.zero_updates import VOCABULARY, save_small_checkpoint, states, zero_config

Case = tuple[str, int]
CASES: list[Case] = [(aggregation, size) for aggregation in ("token_mean", "sequence_mean") for size in (1, 7, 32)]
BAR = 1e-6


def config_of(aggregation: str, stage: int = 0) -> RunConfig:
    """KL, entropy, discounts, weight decay and a clip of 0.5, which binds in every step."""
    return zero_config(stage, loss_aggregation=aggregation, gamma=0.97, lambda_critic=0.9, weight_decay=0.01)


@dataclass(frozen=True)
class Start:
    """Where every case begins, and what it trains on."""

    checkpoint: Path
    """The initial policy, to which the KL term ties."""
    saved: Path
    """The backend's state three updates later."""
    batches: dict[int, list[TrajectoryTensors]]
    """By size."""

    def rounds(self, size: int) -> list[list[TrajectoryTensors]]:
        """Two updates: of what the first leaves behind (divisors, loss scales), nothing must reach the second."""
        return [self.batches[size], self.batches[1]]

    def one_batch(self, aggregation: str) -> OneBatchTrainer:
        config = config_of(aggregation)
        trainer = OneBatchTrainer(
            PaddedPolicy(self.checkpoint),
            PaddedCritic(self.checkpoint),
            PaddedPolicy(self.checkpoint),
            UpdateSettings.of(config),
            optimizer_options(config.trainer, config.trainer.policy_lr),
        )
        trainer.load(self.saved)
        return trainer


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    folder = tmp_path_factory.mktemp("start")
    config = config_of("token_mean")
    backend = TorchReferenceBackend(config, save_small_checkpoint(folder))
    torch.nn.init.normal_(backend._critic.module.get_parameter("head.weight"), std=0.1)  # else every value is 0

    def drawn(count: int, seed: int) -> list[TrajectoryTensors]:
        return uneven_trajectories(backend, VOCABULARY, count, seed)

    update = Update(backend, UpdateSettings.of(config))
    for seed in range(3):
        one_by_one(backend, update, drawn(8, seed))
    saved = folder / "saved"
    saved.mkdir()
    backend.save(saved)
    return Start(folder, saved, {size: drawn(size, seed=100 + size) for _, size in CASES})


Result = tuple[Norms, dict[str, Tensor]]


@pytest.fixture(scope="module")
def expected(start: Start) -> dict[Case, list[Result]]:
    """Norms and weights after each round of each case, by one batch."""
    results: dict[Case, list[Result]] = {}
    for aggregation, size in CASES:
        trainer = start.one_batch(aggregation)
        results[aggregation, size] = [(trainer.update(batch), trainer.states()) for batch in start.rounds(size)]
    return results


@pytest.fixture(scope="module", params=[0, 1, 2, 3], ids=lambda stage: f"zero-{stage}")
def backend(request: pytest.FixtureRequest, start: Start) -> Iterator[TrainingBackend]:
    """One engine pair for all cases of a stage; each loads its start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero, "PERSISTENCE_THRESHOLD", 0)  # partition also what is as small as everything here
        deepspeed = DeepSpeedBackend(config_of("token_mean", request.param), start.checkpoint)
    yield deepspeed
    deepspeed.close()


@pytest.mark.parametrize(("aggregation", "size"), CASES)
def test_one_by_one_equals_one_batch(
    backend: TrainingBackend, start: Start, expected: dict[Case, list[Result]], aggregation: str, size: int
) -> None:
    config = config_of(aggregation)
    backend.load(start.saved)
    update = Update(backend, UpdateSettings.of(config))
    for batch, (norms, weights) in zip(start.rounds(size), expected[aggregation, size], strict=True):
        found, stats = one_by_one(backend, update, batch)
        assert len(norms["critic"]) == config.critic.updates_per_policy_update == 2
        for role in ("critic", "policy"):
            assert found[role] == pytest.approx(norms[role], rel=1e-5), role
            assert min(norms[role]) > config.trainer.gradient_clip, "clipping that binds belongs into this test"
        assert len(batch) == 1 or every_fate(stats), "rejected and stale tokens belong into this test"
        tensors = states(backend)
        assert tensors.keys() == weights.keys()
        for name, weight in weights.items():
            distance = float((tensors[name] - weight).abs().max())
            assert distance <= BAR, f"{name} is {distance} away"


def test_the_bar_separates(start: Start, expected: dict[Case, list[Result]]) -> None:
    """What this file must notice is over a hundred times the bar: a lost trajectory, and the other mean."""
    trainer = start.one_batch("token_mean")
    before = trainer.states()
    trainer.update(start.batches[32][:-1])
    _, tokens = expected["token_mean", 32][0]
    _, sequences = expected["sequence_mean", 32][0]
    assert farthest(before, tokens, "") > 1000 * BAR
    for role in ("policy", "critic"):
        assert farthest(trainer.states(), tokens, role) > 100 * BAR, role
    assert farthest(sequences, tokens, "policy") > 100 * BAR
    assert farthest(sequences, tokens, "critic") == 0.0, "the critic's mean is over tokens"


def farthest(left: dict[str, Tensor], right: dict[str, Tensor], role: str) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left if name.startswith(role))
