from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sao.telemetry.health import Health

LIMIT_S = 10.0


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(LIMIT_S, clock)


def test_work_without_progress_is_not_alive_once_the_limit_has_passed(health: Health, clock: Clock) -> None:
    health.working("update 7")
    clock.now += LIMIT_S
    assert health.alive()[0]
    clock.now += 0.1
    alive, sentence = health.alive()
    assert not alive
    assert sentence == "stalled: no progress for 10.1 s (limit 10 s) with work to do: update 7"


def test_idle_is_alive_for_ever(health: Health, clock: Clock) -> None:
    health.working("update 7")
    health.idle("no trajectory yet")
    clock.now += 1e9
    assert health.alive()[0]
    assert "no trajectory yet" in health.alive()[1]


def test_a_process_that_has_only_started_is_alive_and_not_ready(health: Health, clock: Clock) -> None:
    clock.now += 1e9
    assert health.alive()[0]
    assert health.ready() == (False, "not ready")


def test_progress_restarts_the_stall_clock(health: Health, clock: Clock) -> None:
    health.working("update 7")
    for _ in range(5):
        clock.now += LIMIT_S * 0.9
        health.progress()
        assert health.alive()[0]
    clock.now += LIMIT_S * 1.1
    assert not health.alive()[0]


def test_a_loop_that_spins_over_the_same_work_is_found_out(health: Health, clock: Clock) -> None:
    for attempt in range(20):
        health.working(f"attempt {attempt}")
        clock.now += 1.0
    assert not health.alive()[0]
    assert "attempt 19" in health.alive()[1]


def test_the_clock_starts_with_the_work_not_with_the_idleness_before(health: Health, clock: Clock) -> None:
    health.idle("queue is empty")
    clock.now += 100 * LIMIT_S
    health.working("update 8")
    assert health.alive()[0]


def test_a_stalled_process_recovers_with_progress(health: Health, clock: Clock) -> None:
    health.working("x")
    clock.now += 2 * LIMIT_S
    assert not health.alive()[0]
    health.progress()
    assert health.alive()[0]


def test_readiness_follows_what_is_said(health: Health) -> None:
    health.set_ready(True)
    assert health.ready() == (True, "ready")
    health.set_ready(False)
    assert not health.ready()[0]


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_no_time_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="stalled_after_s"):
        Health(limit)


class AgainstTheRule(RuleBasedStateMachine):
    """Whatever the order of calls: dead exactly when there is work and the last sign of life is too old."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.health = Health(LIMIT_S, self.clock)
        self.has_work = False
        self.sign_of_life = self.clock.now

    @rule(seconds=st.floats(0, 3 * LIMIT_S))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def working(self) -> None:
        self.health.working("work")
        if not self.has_work:
            self.sign_of_life = self.clock.now
        self.has_work = True

    @rule()
    def progress(self) -> None:
        self.health.progress()
        self.sign_of_life = self.clock.now

    @rule()
    def idle(self) -> None:
        self.health.idle("nothing")
        self.has_work = False

    @invariant()
    def dead_only_with_old_work(self) -> None:
        stalled = self.has_work and self.clock.now - self.sign_of_life > LIMIT_S
        assert self.health.alive()[0] is not stalled


TestAgainstTheRule = AgainstTheRule.TestCase
