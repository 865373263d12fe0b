from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from sao.config import ConfigError, load_run_config
from sao.retention import Duty, Pass, Retention, RetentionMetrics, in_thread, pause_s
from tests.support.waiting import eventually

NOW_S = 1_700_000_000.0


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> RetentionMetrics:
    return RetentionMetrics(
        Counter("erased", "-", ["class"], registry=registry),
        Counter("failed", "-", ["class"], registry=registry),
        Gauge("passed", "-", ["class"], registry=registry),
    )


def shown(registry: CollectorRegistry, name: str, text: str) -> float | None:
    return registry.get_sample_value(name, {"class": text})


async def test_each_pass_is_given_the_moment_and_counted_by_class(
    registry: CollectorRegistry, metrics: RetentionMetrics
) -> None:
    asked: list[int] = []

    async def erase(before_ms: int) -> Pass:
        asked.append(before_ms)
        return Pass(3)

    retention = Retention(
        [Duty("archive", 2.0, erase), Duty("logs", "forever", erase)], metrics, wall_clock=lambda: NOW_S
    )
    assert shown(registry, "erased_total", "archive") == 0.0, "a counter that is there before it rises"
    await retention.once()
    assert asked == [int((NOW_S - 7200) * 1000)], "nothing is asked of what is kept for ever"
    assert shown(registry, "erased_total", "archive") == 3.0
    assert shown(registry, "failed_total", "archive") == 0.0
    assert shown(registry, "passed", "archive") == NOW_S
    assert shown(registry, "erased_total", "logs") is None


async def test_what_fails_is_counted_and_tried_again_and_hinders_nobody(
    registry: CollectorRegistry, metrics: RetentionMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Callable[[], Pass]] = [lambda: Pass(1, "a file is damaged"), lambda: 1 // 0, lambda: Pass(2)]  # type: ignore[list-item,return-value]
    done = asyncio.Event()

    def erase(_: int) -> Pass:
        return answers.pop(0)() if answers else Pass()

    async def other(_: int) -> Pass:
        done.set()
        return Pass(5)

    monkeypatch.setattr("sao.retention.SHORTEST_PAUSE_S", 0.001)
    retention = Retention([Duty("archive", 1e-9, in_thread(erase)), Duty("logs", 1.0, other)], metrics)
    async with retention.beside():
        await eventually(lambda: shown(registry, "erased_total", "archive") == 3.0, what="the third pass")
        await done.wait()
    assert not answers
    assert shown(registry, "failed_total", "archive") == 2.0
    assert shown(registry, "erased_total", "logs") == 5.0
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(("keep_h", "seconds"), [(1e-6, 1.0), (1.0, 360.0), (10.0, 3600.0), (1000.0, 3600.0)])
def test_a_pass_comes_within_a_tenth_of_the_time(keep_h: float, seconds: float) -> None:
    assert pause_s(keep_h) == seconds


def test_a_time_for_the_archive_beside_checkpoints_for_ever_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.keep_every is 25") as caught:
        load_run_config(None, ["retention.archive_h=24"], env={})
    assert caught.value.key == "retention.archive_h"
    config = load_run_config(None, ["retention.archive_h=24", "checkpoint.keep_every=0"], env={})
    assert config.retention.archive_h == 24.0
    assert load_run_config(None, ["retention.set_aside_h=forever"], env={}).retention.set_aside_h == "forever"
