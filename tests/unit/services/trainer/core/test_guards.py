"""Each guard trips on the collapse it is for, on no healthy run, and clears."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.config import load_run_config
from sao.config.load import preset_names
from sao.config.schema import GuardsSection
from services.trainer.core.guards import (
    CALM,
    GUARD_NAMES,
    Guards,
    Trip,
    entropy_slope,
    explained_variance,
    mismatch_kl,
    rejected_share,
)

HEALTHY = Path(__file__).with_name("healthy_run.csv")
"""What the guards read of 1000 updates of the `calculator` task: seed 0, four trajectories an update, max_lag 8."""

Numbers = dict[str, float]


def healthy_run() -> list[Numbers]:
    with HEALTHY.open(newline="") as file:
        return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def update(**numbers: float) -> Numbers:
    """Metrics of an update in which nothing is wrong, but for `numbers` (two underscores stand for a dot)."""
    sound = {
        "entropy": 0.5,
        "dis_rejected_low_fraction": 0.0,
        "dis_rejected_high_fraction": 0.0,
        "dis_non_finite_fraction": 0.0,
        "dis_stale_fraction": 0.0,
        "kl_rollout.lag_0": 1e-3,
        "dis_tokens.lag_0": 100.0,
        "explained_variance": 0.3,
    }
    return sound | {name.replace("__", "."): value for name, value in numbers.items()}


def tripped(settings: GuardsSection, history: Sequence[Numbers]) -> list[list[Trip]]:
    """What has not cleared after each update."""
    guards = Guards(settings)
    found = []
    for numbers in history:
        guards.observe(numbers)
        found.append(guards.tripped)
    return found


@pytest.mark.parametrize("preset", preset_names())
def test_a_healthy_run_trips_no_guard_of_any_preset(preset: str) -> None:
    settings = load_run_config(None, [], env={}, preset=preset).guards
    assert not any(tripped(settings, healthy_run()))


def test_a_healthy_run_keeps_its_distance_from_the_defaults() -> None:
    settings, run = GuardsSection(), healthy_run()
    windows = [run[end - settings.window : end] for end in range(settings.window, len(run) + 1)]

    def worst(statistic: Callable[[Sequence[Numbers]], float | None]) -> list[float]:
        return sorted(value for window in windows if (value := statistic(window)) is not None)

    assert worst(entropy_slope)[-1] == pytest.approx(0.0122, abs=1e-4)  # the first fifty, in which most is learned
    assert worst(rejected_share)[-1] == pytest.approx(0.0144, abs=1e-4)
    assert worst(explained_variance)[0] == pytest.approx(0.092, abs=1e-3)
    # Under this lag hardly a token is sampled from the newest weights, so there is no mismatch to judge.
    assert worst(mismatch_kl) == []


def jump(before: float, after: float, name: str) -> list[Numbers]:
    return [update(**{name: before})] * 60 + [update(**{name: after})] * 60


COLLAPSES = {
    "entropy_slope": jump(0.3, 3.4, "entropy"),
    "rejected_share": jump(0.05, 0.7, "dis_rejected_low_fraction"),
    "mismatch_kl": jump(1e-2, 0.5, "kl_rollout__lag_0"),
    "explained_variance": jump(0.2, -8.0, "explained_variance"),
}


@pytest.mark.parametrize("guard", GUARD_NAMES)
def test_each_guard_trips_alone_on_its_collapse_and_can_be_turned_off(guard: str) -> None:
    history = COLLAPSES[guard]
    after_each = tripped(GuardsSection(), history)
    names = {trip.guard for trips in after_each for trip in trips}
    assert names == {guard}
    assert not any(after_each[:60])
    assert not any(tripped(GuardsSection.model_validate({guard: "off"}), history))


@pytest.mark.parametrize("guard", GUARD_NAMES)
def test_a_guard_clears_when_its_number_is_sound_again(guard: str) -> None:
    after_each = tripped(GuardsSection(), COLLAPSES[guard] + [update()] * 70)
    assert any(after_each)
    assert not after_each[-1]


def test_a_policy_that_freezes_is_noticed() -> None:
    collapse = [update(entropy=2.0)] * 25 + [update(entropy=0.01)] * 25
    (trip,) = tripped(GuardsSection(), collapse)[-1]
    assert str(trip).startswith("entropy_slope 0.0597 nats per update, limit 0.05")


def test_a_switch_of_the_preference_trips_nothing() -> None:
    """The shape of a measured switch: for 45 trajectories the explained variance falls as low as -19."""
    for preset, per_update in (("tiny-writing", 4), ("tiny-writing", 1), ("online-writing", 128)):
        settings = load_run_config(None, [], env={}, preset=preset).guards
        switch = [update(explained_variance=-19.0)] * max(45 // per_update, 1)
        history = [update()] * 100 + switch + [update()] * 100
        assert not any(tripped(settings, history))


def test_nothing_is_judged_before_the_window_is_full() -> None:
    after_each = tripped(GuardsSection(window=10), [update(dis_rejected_high_fraction=0.9)] * 12)
    assert [bool(trips) for trips in after_each] == [False] * 9 + [True] * 3


def test_one_update_within_the_limit_does_not_clear() -> None:
    settings = GuardsSection(window=2, explained_variance=0.0)
    bad, good = update(explained_variance=-0.5), update(explained_variance=0.5)

    after_each = tripped(settings, [bad, bad, good, *[bad] * 2, *[good] * CALM])

    assert [bool(trips) for trips in after_each] == [False, *[True] * 6, False]
    assert {trip.value for trips in after_each for trip in trips} == {-0.5}


def test_a_number_that_is_no_longer_defined_clears_its_guard() -> None:
    """While publishing is held no token is at lag 0: a mismatch could otherwise never clear."""
    undefined = update()
    del undefined["kl_rollout.lag_0"]
    after_each = tripped(GuardsSection(window=4), [update(kl_rollout__lag_0=1.0)] * 4 + [undefined] * 6)
    assert [len(trips) for trips in after_each] == [0, 0, 0, *[1] * 5, 0, 0]


def test_the_share_of_rejected_tokens_is_one_of_those_that_are_not_stale() -> None:
    window = [update(dis_stale_fraction=0.5, dis_rejected_low_fraction=0.1, dis_non_finite_fraction=0.05)] * 4
    assert rejected_share(window) == pytest.approx(0.3)
    assert rejected_share([update(dis_stale_fraction=1.0)] * 4) is None


def test_the_mismatch_is_a_mean_over_tokens() -> None:
    window = [update(kl_rollout__lag_0=0.0, dis_tokens__lag_0=99.0), update(kl_rollout__lag_0=1.0, dis_tokens__lag_0=1)]
    assert mismatch_kl(window) == pytest.approx(0.01)


@given(st.lists(st.floats(0, 5), min_size=4, max_size=12), st.floats(-1, 1))
def test_the_slope_is_that_of_the_line(noise: list[float], slope: float) -> None:
    """Adding a line adds its slope; a constant adds none."""

    def signed(values: Sequence[float]) -> float:
        steep = 1e3  # steep enough that the absolute value keeps the sign apart
        found = entropy_slope([update(entropy=value + steep * x) for x, value in enumerate(values)])
        assert found is not None
        return found - steep

    tilted = [value + slope * x for x, value in enumerate(noise)]
    assert signed(tilted) - signed(noise) == pytest.approx(slope, abs=1e-6)
    assert signed([value + 7.0 for value in noise]) == pytest.approx(signed(noise), abs=1e-6)


@given(seed=st.integers(0, 2**32), window=st.integers(2, 5), length=st.integers(0, 20))
def test_what_the_guards_say_follows_from_their_memory(seed: int, window: int, length: int) -> None:
    rng = random.Random(seed)
    settings = GuardsSection(window=window, entropy_slope=0.3, explained_variance=0.0)
    history = [update(entropy=rng.random(), explained_variance=rng.uniform(-1, 0.3)) for _ in range(length)]
    whole, recalled = Guards(settings), Guards(settings)
    for numbers in history:
        whole.observe(numbers)
    for numbers in history[-whole.memory :]:
        recalled.observe(numbers)
    assert recalled.tripped == whole.tripped
