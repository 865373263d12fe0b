"""A slice of `make prove-judge`: a judge that fails 30 % and stalls 10 % of its calls, beside a real reward service."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path

from bench.judge.run import FAIL, JUDGED, SLOW, Load, part, untruths

LOAD = Load(trajectories=80, per_second=100, deadline_s=1.0, claim_idle_s=1.5, max_deliveries=2)


async def test_what_fails_is_typed_as_it_was_injected_and_never_a_zero(tmp_path: Path, valkey_url: str) -> None:
    read = await part(tmp_path / f"judge-{uuid.uuid4().hex[:8]}", valkey_url, LOAD, JUDGED, judge=True)
    assert untruths(read) == []
    fates = Counter(call.fate.kind for call in read.calls)
    assert len(read.outcomes) + len(read.dead) == LOAD.trajectories
    assert set(fates) == {"scored", "timeout", "infra_failed"}
    for kind, share in (("infra_failed", FAIL), ("timeout", SLOW)):
        assert abs(fates[kind] / len(read.calls) - share) < 0.15  # so much was injected at all
    # The slow ones hold up nobody: all of them were begun in little more than the time they took to come.
    assert read.seconds < LOAD.trajectories / LOAD.per_second + 3 * LOAD.deadline_s
