"""A slice of `make prove-fuzz`: requests that nobody should send, to real services."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fuzz.run import Share, fuzz


@pytest.mark.timeout(180)
@pytest.mark.parametrize("replay", [False, True], ids=["routing-off", "routing-replayed"])
async def test_nothing_malformed_is_kept_and_nothing_whole_is_refused(tmp_path: Path, replay: bool) -> None:
    first = 1500 * replay
    share = Share(grpc=range(first, first + 1500), rest=range(first // 6, first // 6 + 250))
    found = await fuzz(share, tmp_path, replay=replay)
    assert found["problems"] == []
    assert found["counts"]["grpc malformed"] > 1000
    assert found["counts"]["grpc taken"] > 100
    assert found["counts"]["rest 4xx"] > 100
