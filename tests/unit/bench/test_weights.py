"""The judgement of `make prove-weights` sees what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.weights.fleet import Sample, lost, uncovered, unverified
from bench.weights.sync import Measurement
from bench.weights.sync import judge as judge_sync

SAMPLE = Sample(
    ordinal=7,
    engine_id="engine-0",
    prompt=[1, 5],
    tokens=[4, 9, 3],
    logprobs=[-1.0, -2.0, -0.5],
    spans=[("v00000001", 0, 2), ("v00000002", 2, 3)],
)


def test_a_version_counts_only_on_the_engine_that_was_verified_for_it() -> None:
    both = {"v00000001", "v00000002"}
    assert unverified([SAMPLE], {"engine-0": both}) == []
    assert "v00000002" in unverified([SAMPLE], {"engine-0": {"v00000001"}, "engine-1": both})[0]
    assert len(unverified([SAMPLE], {})) == 2


@pytest.mark.parametrize(
    "spans", [[("v00000001", 0, 2)], [("v00000001", 0, 2), ("v00000002", 1, 3)], [("v00000001", 1, 3)], []]
)
def test_every_token_needs_a_version_and_only_one(spans: list[tuple[str, int, int]]) -> None:
    assert uncovered([SAMPLE]) == []
    assert len(uncovered([replace(SAMPLE, spans=spans)])) == 1


def test_an_episode_ends_once() -> None:
    assert lost({7}, [SAMPLE]) == []
    assert "7 ended with 2" in lost({7}, [SAMPLE, SAMPLE])[0]
    assert "8 ended with 0" in lost({7, 8}, [SAMPLE])[0]


def _measured(sync: float, pause: float) -> Measurement:
    steps = {"load": pause, "checksums": 0.2, "canary": 0.1, "prime": 0.1}
    return Measurement(write=1.0, commit=1.0, sync=sync, pause=pause, steps=steps, copy=0.5, reload=0.5)


def test_sync_and_pause_are_held_to_their_bars() -> None:
    assert judge_sync([_measured(1.4, 0.3)])["problems"] == []
    slow, long = judge_sync([_measured(1.6, 0.3)]), judge_sync([_measured(1.4, 0.4)])
    assert not slow["passed"]
    assert not long["passed"]
    assert "1.6 of copy and reload" in slow["problems"][0]
    assert slow["problems"][0].endswith("the engine's own load, checksums, canary alone take 0.6")
    assert (slow["medians"]["engine"], slow["medians"]["floor"]) == (0.6, 0.6)
    assert "the pause" in long["problems"][0]
    assert judge_sync([_measured(1.0, 0.2), _measured(1.0, 0.2), _measured(9.0, 9.0)])["passed"], "medians"
