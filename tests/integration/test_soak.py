"""A slice of `make prove-soak`: what can be counted. Only the proof is long enough to judge a process's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.soak.run import STEP, Bounds, leaks, running, slope


@pytest.mark.timeout(180)
async def test_three_thousand_trajectories_leave_their_ids_behind_and_nothing_else(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        samples = []
        for _ in range(3):
            await world.feed(STEP)
            samples.append(await world.sample())
        assert await world.dead_letters() == 0
    assert leaks(samples) == []
    assert slope(samples, [sample.used_memory for sample in samples]) <= Bounds().valkey
