"""The numbers of an update are those of all its trajectories, whichever rank trained them."""

from __future__ import annotations

import pytest

from services.trainer.consumer import Taken
from services.trainer.core.update import Update, UpdateSettings
from services.trainer.records import summary
from tests.unit.services.trainer.conftest import NewWorld
from tests.unit.services.trainer.core.toy import toy_backend
from tests.unit.services.trainer.test_consumer import consumer_of, take


async def test_what_the_summary_says_is_what_one_rank_with_all_of_them_would_say(new_world: NewWorld) -> None:
    world = new_world()
    consumer = await consumer_of(world)
    await world.deliver_many(3)
    taken = [found for found in [await take(consumer) for _ in range(3)] if isinstance(found, Taken)]
    update = Update(toy_backend(), UpdateSettings(max_lag=100))
    update.begin()
    for one in taken:
        tokens_T = one.tensors.tokens_T % 5  # the toy's vocabulary is smaller
        update.accumulate(type(one.tensors)(**(vars(one.tensors) | {"tokens_T": tokens_T})))
    alone = update.finish().metrics

    numbers = summary(taken)

    shared = sorted(numbers.keys() & alone.keys())
    assert shared == ["action_tokens", "lag_max", "lag_mean", "reward_mean", "trajectories"]
    assert [numbers[name] for name in shared] == pytest.approx([alone[name] for name in shared])
