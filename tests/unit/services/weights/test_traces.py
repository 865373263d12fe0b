"""A round of an engine is a span below the version's root, which nobody has to hand over."""

from __future__ import annotations

from pathlib import Path

from sao.telemetry.traces import context_of_version
from services.weights.engines.memory import Faults
from tests.unit.services.weights.world import World

STEPS = ["prime", "pause", "load", "resume", "checksums", "canary"]


async def test_rounds_hang_below_their_version_and_steps_below_them(tmp_path: Path) -> None:
    world = World(tmp_path, engines=2)
    await world.restore()
    manifest = await world.publish(1)
    await world.settle()

    root = context_of_version(manifest.run, manifest.version)
    rounds = [span for span in world.tracer.spans if span.name == "round"]
    assert sorted(str(span.attributes["engine"]) for span in rounds) == ["engine-0", "engine-1"]
    for span in rounds:
        assert (span.context.trace_id, span.parent_id) == (root.trace_id, root.span_id)
        assert (span.attributes["version"], span.failure) == (manifest.version, "")
        below = [one for one in world.tracer.spans if one.parent_id == span.context.span_id]
        assert [one.attributes["step"] for one in below] == STEPS


async def test_a_round_that_proves_nothing_says_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.restore()
    await world.publish(1)
    await world.settle()
    world.tracer.spans.clear()
    world.engines[0].faults = Faults(ignore_load=True)
    bad = await world.publish(2)
    await world.settle()

    failures = {str(one.attributes["version"]): one.failure for one in world.tracer.spans if one.name == "round"}
    assert failures[bad.version] == "VerificationError"
