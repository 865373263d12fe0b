"""Reward hacking on histories whose truth is known, and how often noise alone raises an alarm."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping

import pytest
from structlog.testing import capture_logs

from sao.config.schema import AlarmsSection
from sao.preference import Preference, PreferenceDocument
from services.reward import metrics
from services.reward.alarm_watch import AlarmWatch
from services.reward.alarms import LENGTH, WINDOWS, Alarms, Change

SETTINGS = AlarmsSection(window=100)
SPAN = WINDOWS * SETTINGS.window
DOCUMENT = PreferenceDocument(name="p", weights={"style": 1.0, "plain": -0.5}, gates=["quality"])
PREFERENCE = Preference(version=3, document=DOCUMENT)

Levels = Callable[[float], Mapping[str, float]]
"""The mean of each component at a share of the way, 0 to 1."""


def history(levels: Levels, *, seed: int, noise: float = 0.2, count: int = 3 * SPAN) -> Iterable[dict[str, float]]:
    """Level before the first third, moving over the second, level after it."""
    rng = random.Random(seed)
    for i in range(count):
        share = min(max(3 * i / count - 1, 0.0), 1.0)
        yield {name: rng.gauss(mean, noise * (1 if name != LENGTH else 50)) for name, mean in levels(share).items()}


def changes(alarms: Alarms, values: Iterable[Mapping[str, float]], preference: Preference = PREFERENCE) -> list[Change]:
    return [change for one in values for change in alarms.observe(one, preference)]


def pairs(found: Iterable[Change], *, raised: bool = True) -> set[tuple[str, str]]:
    return {(change.alarm.rising, change.alarm.collapsing) for change in found if change.raised is raised}


def steady(share: float) -> Mapping[str, float]:
    return {"style": 0.4, "quality": 0.8, "plain": 0.3, LENGTH: 40.0}


@pytest.mark.parametrize("seed", range(3))
def test_a_style_that_eats_the_quality_is_an_alarm_that_ends_when_both_are_steady_again(seed: int) -> None:
    def hacked(share: float) -> Mapping[str, float]:
        return {**steady(share), "style": 0.4 + 0.5 * share, "quality": 0.8 - 0.7 * share}

    alarms = Alarms(SETTINGS)
    found = changes(alarms, history(hacked, seed=seed))
    assert pairs(found) == pairs(found, raised=False) == {("style", "quality")}
    assert alarms.active() == []
    raised = next(change.alarm for change in found if change.raised)
    assert raised.rise >= SETTINGS.rise
    assert raised.collapse >= SETTINGS.collapse
    assert raised.rising_from < raised.rising_to
    assert raised.collapsing_from > raised.collapsing_to
    assert raised.preference == 3


def test_a_length_that_collapses_as_the_reward_rises_is_an_alarm() -> None:
    def terse(share: float) -> Mapping[str, float]:
        return {**steady(share), "style": 0.4 + 0.4 * share, LENGTH: 40 - 30 * share}

    assert pairs(changes(Alarms(SETTINGS), history(terse, seed=1))) == {("style", LENGTH)}


def test_what_the_preference_itself_weighs_down_may_fall() -> None:
    def as_asked(share: float) -> Mapping[str, float]:
        return {**steady(share), "style": 0.2 + 0.6 * share, "plain": 0.8 - 0.7 * share}

    assert changes(Alarms(SETTINGS), history(as_asked, seed=2)) == []


def test_what_nobody_rewards_may_rise() -> None:
    def other(share: float) -> Mapping[str, float]:
        return {**steady(share), "plain": 0.1 + 0.8 * share, "quality": 0.8 - 0.7 * share}

    assert changes(Alarms(SETTINGS), history(other, seed=2)) == []


def test_everything_rising_or_everything_falling_is_no_hacking() -> None:
    def better(share: float) -> Mapping[str, float]:
        return {name: value * (1 + share) for name, value in steady(share).items()}

    assert changes(Alarms(SETTINGS), history(better, seed=3)) == []
    assert changes(Alarms(SETTINGS), history(lambda share: better(1 - share), seed=3)) == []


@pytest.mark.parametrize("window", [50, 200])
def test_stationary_noise_raises_no_alarm(window: int) -> None:
    """Bound: none in 10,000 trajectories; at the smallest window a false one takes a rise of 2.5 standard errors
    together with a collapse of 5.
    """
    alarms, rng, found = Alarms(AlarmsSection(window=window)), random.Random(window), []
    for _ in range(10_000):
        values = {
            "style": rng.random(),
            "quality": float(rng.random() < 0.1),
            "plain": rng.expovariate(1.0),
            LENGTH: rng.lognormvariate(4, 1),
        }
        found += alarms.observe(values, PREFERENCE)
    assert found == []


def test_a_move_too_small_to_matter_is_none_however_quiet_the_component() -> None:
    def hair(share: float) -> Mapping[str, float]:
        return {**steady(share), "style": 0.5 + 0.02 * share, "quality": 0.9 - 0.03 * share}

    assert changes(Alarms(SETTINGS), history(hair, seed=4, noise=1e-6)) == []


def test_components_that_never_vary_are_compared_too() -> None:
    def leap(share: float) -> Mapping[str, float]:
        return {"style": float(share >= 1), "quality": float(share < 1), LENGTH: 10.0}

    found = changes(Alarms(SETTINGS), history(leap, seed=0, noise=0.0))
    assert pairs(found) == {("style", "quality")}
    assert all(math.isfinite(change.alarm.rise) for change in found)


def test_a_new_preference_begins_a_new_history() -> None:
    alarms = Alarms(SETTINGS)
    low, high = {"style": 0.1, "quality": 0.9}, {"style": 0.9, "quality": 0.1}
    assert changes(alarms, [low] * SPAN) == []
    newer = Preference(version=4, document=DOCUMENT)
    assert changes(alarms, [high] * SPAN, newer) == []
    # What was scored under the older one and comes late says nothing about now.
    assert changes(alarms, [low] * SPAN) == []
    raised = changes(alarms, [low, high] * SETTINGS.window + [high] * 3 * SETTINGS.window, newer)
    assert all(change.alarm.preference == 4 for change in raised)


def test_a_preference_that_changes_ends_its_alarms() -> None:
    alarms = Alarms(SETTINGS)
    changes(alarms, [{"style": 0.1, "quality": 0.9}] * SPAN)
    changes(alarms, [{"style": 0.9, "quality": 0.1}] * SETTINGS.window)
    assert [(alarm.rising, alarm.collapsing) for alarm in alarms.active()] == [("style", "quality")]
    ended = alarms.observe({"style": 0.9, "quality": 0.1}, Preference(version=9, document=DOCUMENT))
    assert pairs(ended, raised=False) == {("style", "quality")}
    assert alarms.active() == []


def test_a_component_that_was_not_always_there_is_left_out() -> None:
    alarms = Alarms(SETTINGS)
    changes(alarms, [{"quality": 0.9}] * SPAN)
    assert changes(alarms, [{"style": 0.9, "quality": 0.1}] * SETTINGS.window) == []


def test_each_change_is_one_line_and_the_gauge_follows() -> None:
    watch = AlarmWatch(Alarms(SETTINGS))
    gauge = metrics.HACKING.labels("style", "quality")
    with capture_logs() as lines:
        for value in [0.1] * SPAN + [0.9] * SETTINGS.window:
            watch.observe({"style": value, "quality": 1 - value}, PREFERENCE)
        assert gauge._value.get() == 1
        assert [alarm.rising for alarm in watch.active()] == ["style"]
        for _ in range(SPAN):
            watch.observe({"style": 0.9, "quality": 0.1}, PREFERENCE)
    assert gauge._value.get() == 0
    assert [(line["log_level"], line["rising"], line["collapsing"]) for line in lines] == [
        ("warning", "style", "quality"),
        ("info", "style", "quality"),
    ]


def test_a_move_that_hovers_at_its_bound_is_one_alarm_until_it_has_clearly_come_back() -> None:
    def around(rise: float, collapse: float) -> list[dict[str, float]]:
        """A window whose means lie so many standard deviations from 0."""
        return [
            {"style": rise + (1 if i % 2 else -1), "quality": -collapse + (1 if i % 2 else -1)}
            for i in range(SETTINGS.window)
        ]

    alarms = Alarms(SETTINGS)
    assert changes(alarms, WINDOWS * around(0, 0)) == []
    assert pairs(changes(alarms, around(0.55, 1.1))) == {("style", "quality")}
    assert changes(alarms, around(0.45, 0.9)) == []
    assert pairs(changes(alarms, around(0.2, 0.9)), raised=False) == {("style", "quality")}


@pytest.mark.parametrize("scale", [1e120, 1e155, 1e200, 1.7e308])
def test_a_component_as_large_as_a_number_can_be_is_watched_like_any_other(scale: float) -> None:
    def huge(share: float) -> Mapping[str, float]:
        return {**steady(share), "style": 0.4 + 0.5 * share, "quality": 0.8 - 0.7 * share}

    values = [
        {**one, "style": scale * max(min(one["style"] / 2, 1.0), -1.0)} for one in history(huge, seed=0, count=2 * SPAN)
    ]
    assert pairs(changes(Alarms(SETTINGS), values)) == {("style", "quality")}
