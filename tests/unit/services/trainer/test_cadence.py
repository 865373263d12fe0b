"""When versions are published: by updates, by seconds, and by lag before either."""

from __future__ import annotations

import pytest

from services.trainer.cadence import Cadence
from tests.support.training import World
from tests.unit.services.trainer.conftest import NewWorld
from tests.unit.services.trainer.test_loop import rows


def published(cadence: Cadence, *, updates: int, seconds: float) -> list[int]:
    """Updates with a version, when one takes `seconds`."""
    found = []
    for update in range(cadence.update + 1, updates + 1):
        if cadence.due(update, now := update * seconds):
            cadence.published(update, now)
            found.append(update)
    return found


@pytest.mark.parametrize(
    ("every", "min_seconds", "max_lag", "expected"),
    [
        (1, 0.0, 4, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (5, 0.0, 4, [5, 10]),
        (1, 3.0, 100, [3, 6, 9, 12]),
        (2, 3.0, 100, [3, 6, 9, 12]),
        (5, 6.0, 100, [6, 12]),
        (1, 60.0, 4, [5, 10]),
    ],
)
def test_updates_seconds_and_lag(every: int, min_seconds: float, max_lag: int, expected: list[int]) -> None:
    cadence = Cadence(every, min_seconds, max_lag, update=0, at=0.0)
    assert published(cadence, updates=12, seconds=1.0) == expected


def test_a_run_that_begins_between_two_multiples_publishes_at_the_next() -> None:
    assert published(Cadence(5, 0.0, 4, update=7, at=0.0), updates=15, seconds=1.0) == [10, 15]


async def versions(world: World) -> list[bool]:
    trainer = await world.start()
    await trainer.run()
    return [bool(row.version) for row in rows(world)]


async def test_too_early_is_not_published_but_the_last_update_is(new_world: NewWorld) -> None:
    world = new_world("run.updates=3", "trainer.publish_min_seconds=3600")
    await world.deliver_many(6)
    assert await versions(world) == [False, False, True]


async def test_without_seconds_every_update_is(new_world: NewWorld) -> None:
    world = new_world("run.updates=3")
    await world.deliver_many(6)
    assert await versions(world) == [True, True, True]
