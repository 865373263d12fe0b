"""Rounds on engines that misbehave the way real ones do: what serves is proven, and nothing else serves."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sao.board.base import EngineState
from sao.streams.base import StreamUnavailableError
from sao.weights.base import IncompleteVersionError
from sao.weights.manifest import Manifest
from services.weights import metrics
from services.weights.engines.memory import Faults
from services.weights.preflight import directory_layout
from services.weights.staging import Staged
from tests.support.versions import announce, floats, publish_checkpoint, write_safetensors, write_toy_checkpoint
from tests.support.waiting import eventually
from tests.unit.services.weights.world import SERVED, World


@pytest.fixture
async def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    await made.restore()
    return made


@pytest.fixture
async def pair(tmp_path: Path) -> World:
    made = World(tmp_path, engines=2)
    await made.restore()
    return made


async def test_a_version_is_brought_in_step_by_step(world: World) -> None:
    await world.settle()
    version = (await world.publish(1)).version
    await world.settle()
    assert world.board.states() == ["starting", *SERVED]
    facts = await world.facts()
    assert (facts.version, facts.verified, facts.error) == (version, [version], "")
    assert facts.in_rotation
    calls = world.engines[0].calls
    order = ["pause", "load", "resume", "checksums", "generate", "score"]
    positions = [len(calls) - 1 - calls[::-1].index(step) for step in order]
    assert positions == sorted(positions)
    assert world.store.leases() == {"engine-0": version, "target": version}


async def test_intermediate_versions_are_skipped(world: World) -> None:
    await world.publish(1)
    await world.publish(2)
    newest = await world.publish(3)
    await world.settle()
    assert (await world.facts()).verified == [newest.version]


async def test_nothing_is_loaded_before_it_is_announced(world: World, tmp_path: Path) -> None:
    await world.board.new_trainer_epoch()
    source = write_toy_checkpoint(tmp_path / "unannounced", 1)
    publish_checkpoint(world.store, source, lambda _, ids: [-1.0] * (len(ids) - 1))
    assert not await world.fleet.follow()
    await world.settle()
    assert "load" not in world.engines[0].calls


async def test_republished_tensors_pass_though_checksums_do_not_change(world: World) -> None:
    await world.publish(1)
    await world.settle()
    again = await world.publish(1)
    await world.settle()
    assert (await world.facts()).version == again.version


async def test_a_load_that_did_nothing_is_noticed_and_rolled_back(world: World) -> None:
    good = await world.publish(1)
    await world.settle()
    world.engines[0].faults.ignore_load = True
    bad = await world.publish(2)
    await world.settle()
    errors = [facts.error for facts in world.board.history if facts.state is EngineState.QUARANTINED]
    assert len(errors) == 2
    assert all("nothing was loaded" in error for error in errors)
    facts = await world.facts()
    assert (facts.state, facts.version) == (EngineState.SERVING, good.version)
    assert bad.version not in facts.verified
    assert bad.version in world.fleet.refused


async def test_scrambled_weights_never_serve_and_the_next_version_does(world: World) -> None:
    world.engines[0].faults.scramble_load = True
    await world.publish(1)
    await world.settle()
    facts = await world.facts()
    assert facts.state is EngineState.QUARANTINED
    assert "canary" in facts.error
    assert "serving" not in world.board.states()
    world.engines[0].faults.scramble_load = False
    await world.settle(3600.0)
    assert (await world.facts()).state is EngineState.QUARANTINED, "a version that nobody proved is not tried again"
    good = await world.publish(2)
    await world.settle()
    assert (await world.facts()).version == good.version


async def test_a_version_that_gives_no_log_probs_is_rolled_back_and_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finite weights can overflow too: preflight is not there to see it."""
    good = await world.publish(1)
    await world.settle()
    monkeypatch.setattr("services.weights.fleet.inspect", lambda store, version, *_: store.manifest(version))
    bad = await world.publish(2)
    monkeypatch.setattr("services.weights.engines.memory.first_non_finite", lambda path: _is_bad(path, bad.version))
    await world.settle()
    assert "NaN weights" in world.fleet.refused[bad.version]
    facts = await world.facts()
    assert (facts.state, facts.version) == (EngineState.SERVING, good.version)


def _is_bad(path: Path, version: str) -> str | None:
    return "lm_head.weight" if path.name == version else None


async def test_a_version_that_ends_engines_is_given_up_for_the_last_good_one(
    pair: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preflight sees shapes and names, not all that can end a server."""
    good = await pair.publish(1)
    await pair.settle()
    monkeypatch.setattr("services.weights.fleet.inspect", lambda store, version, *_: store.manifest(version))
    source = write_toy_checkpoint(pair.folder / "deadly", 2)
    write_safetensors(source / "model.safetensors", {"lm_head.weight": floats(1.5, 2.0)})
    deadly = publish_checkpoint(pair.store, source, lambda _, ids: [-1.0] * (len(ids) - 1), update=pair.updates)
    await announce(pair.board, deadly)
    await pair.fleet.follow()
    await pair.settle()
    assert deadly.version not in pair.fleet.refused, "once may be a coincidence"
    for _ in range(2):
        for engine in pair.engines:
            engine.restart()
        await pair.settle(2.0)
    assert deadly.version in pair.fleet.refused
    for number, engine in enumerate(pair.engines):
        facts = await pair.facts(number)
        assert (facts.state, facts.version) == (EngineState.SERVING, good.version)
        assert (await engine.model_info()).weight_version == good.version


async def test_a_stale_prefix_cache_is_noticed(world: World) -> None:
    await world.publish(1)
    await world.settle()
    world.engines[0].faults.keep_cache = True
    await world.publish(2)
    await world.settle()
    facts = await world.facts()
    assert facts.state is EngineState.QUARANTINED
    assert "stale prefix cache" in facts.error


async def test_updated_but_not_flushed_is_flushed_and_loaded_again(world: World) -> None:
    world.engines[0].faults.not_flushed_loads = 1
    version = (await world.publish(1)).version
    await world.settle()
    assert (await world.facts()).version == version
    calls = world.engines[0].calls
    at = calls.index("load")
    assert calls[at : at + 3] == ["load", "flush", "load"]


async def test_a_flush_that_stays_refused_fails_the_round(world: World) -> None:
    world.engines[0].faults.not_flushed_loads = 99
    await world.publish(1)
    await world.settle()
    assert (await world.facts()).state is EngineState.QUARANTINED


@pytest.mark.parametrize("step", ["pause", "load", "checksums", "resume", "score", "generate"])
@pytest.mark.parametrize("how", ["hang", "refuse"])
async def test_one_failed_engine_never_blocks_the_other(pair: World, step: str, how: str) -> None:
    await pair.publish(1)
    await pair.settle()
    setattr(pair.engines[0].faults, how, {step})
    version = (await pair.publish(2)).version
    await pair.settle()
    failed, served = await pair.facts(0), await pair.facts(1)
    assert failed.state is EngineState.QUARANTINED
    assert step in failed.error
    assert (served.state, served.version) == (EngineState.SERVING, version)
    assert version not in pair.fleet.refused
    setattr(pair.engines[0].faults, how, ())
    await pair.settle(5.0)
    early = await pair.facts(0)
    assert not early.in_rotation or early.version != version, "the cool-down is not over"
    await pair.settle(6.0)
    assert (await pair.facts(0)).version == version
    assert (await pair.facts(0)).in_rotation


async def test_an_engine_whose_checksums_differ_from_the_others_does_not_serve(pair: World) -> None:
    pair.engines[1].faults.scramble_load = True
    version = (await pair.publish(1)).version
    await pair.settle()
    assert (await pair.facts(0)).in_rotation
    facts = await pair.facts(1)
    assert facts.state is EngineState.QUARANTINED
    assert f"differ from those verified for {version}" in facts.error


async def test_loading_is_never_entered_without_an_acknowledged_quiesce(world: World) -> None:
    world.engines[0].faults.refuse = {"pause"}
    await world.publish(1)
    await world.settle()
    assert "loading" not in world.board.states()
    assert "load" not in world.engines[0].calls


async def test_a_refused_version_never_reaches_an_engine(world: World, tmp_path: Path) -> None:
    good = await world.publish(1)
    await world.settle()
    before = len(world.engines[0].calls)
    source = write_toy_checkpoint(tmp_path / "half", 2)
    write_safetensors(source / "model.safetensors", {"lm_head.weight": floats(1.0, 2.0, 3.0)})
    half = publish_checkpoint(world.store, source, lambda _, ids: [-1.0] * (len(ids) - 1), update=1)
    await announce(world.board, half)
    assert not await world.fleet.follow()
    await world.settle()
    assert len(world.engines[0].calls) == before
    assert (await world.facts()).version == good.version
    assert "layout" in world.fleet.refused[half.version]


async def test_a_wrong_shape_in_the_very_first_version_is_held_against_the_launch_checkpoint(
    world: World, tmp_path: Path
) -> None:
    await world.settle()
    assert directory_layout(tmp_path / "launch")["lm_head.weight"] == ((3,), "float32")
    await world.board.new_trainer_epoch()
    source = write_toy_checkpoint(tmp_path / "shape", 1)
    tensors = {"model.embed_tokens.weight": floats(1.0, 2.0), "lm_head.weight": floats(1.0)}
    write_safetensors(source / "model.safetensors", tensors)
    wrong = publish_checkpoint(world.store, source, lambda _, ids: [-1.0] * (len(ids) - 1))
    await announce(world.board, wrong)
    assert not await world.fleet.follow()
    assert "expected [3]" in world.fleet.refused[wrong.version]


async def test_a_restarted_engine_goes_through_a_full_round(world: World) -> None:
    version = (await world.publish(1)).version
    await world.settle()
    seen = len(world.board.history)
    world.engines[0].restart()
    await world.settle(1.5)
    assert world.board.states()[seen:] == ["quarantined", *SERVED]
    assert "restarted" in world.board.history[seen].error
    assert (await world.facts()).version == version


async def test_an_engine_that_dies_leaves_rotation_and_comes_back_when_it_answers(world: World) -> None:
    version = (await world.publish(1)).version
    await world.settle()
    world.engines[0].faults.unreachable = True
    await world.settle(1.5)
    assert (await world.facts()).state is EngineState.QUARANTINED
    world.engines[0].faults.unreachable = False
    world.engines[0].restart()
    await world.settle(1.5)
    assert (await world.facts()).version == version
    assert (await world.facts()).in_rotation


async def test_an_engine_left_paused_by_an_earlier_process_is_taken_over(world: World) -> None:
    first = (await world.publish(1)).version
    await world.settle()
    await world.engines[0].pause()
    world.start()
    await world.restore()
    assert (await world.facts()).verified == [first]
    assert not (await world.facts()).in_rotation
    second = (await world.publish(2)).version
    await world.settle()
    assert (await world.facts()).verified == [first, second]
    assert not world.engines[0].paused


async def test_a_new_process_rolls_back_to_what_an_earlier_one_proved(world: World) -> None:
    good = await world.publish(1)
    await world.settle()
    world.start()
    await world.restore()
    world.engines[0].faults.ignore_load = True
    await world.publish(2)
    await world.settle()
    assert (await world.facts()).version == good.version
    assert (await world.facts()).in_rotation


@pytest.mark.parametrize("state", list(EngineState)[1:6])
async def test_a_board_outage_at_any_write_is_made_up_for(world: World, state: EngineState) -> None:
    version = (await world.publish(1)).version
    world.board.outage_at = state
    with pytest.raises(StreamUnavailableError):
        await world.settle()
    await world.settle()
    facts = await world.facts()
    assert (facts.state, facts.version) == (EngineState.SERVING, version)


async def test_old_versions_are_collected_but_not_what_an_engine_holds(pair: World) -> None:
    first = (await pair.publish(1)).version
    await pair.settle()
    pair.engines[0].faults.hang = {"pause"}
    for seed in (2, 3, 4):
        await pair.publish(seed)
        await pair.settle(1.5)  # one that did not answer is asked once a second
    await pair.fleet.collect()
    names = pair.store.names()
    assert pair.store.leases()["engine-0"] == first
    assert first in names
    assert len(names) == 3


async def test_an_engine_that_is_still_starting_costs_no_attempt(world: World) -> None:
    world.engines[0].faults.unreachable = True
    version = (await world.publish(1)).version
    for _ in range(60):
        await world.settle(1.5)
    assert world.board.states() == ["starting"] * 2, "the second says why, and says it once"
    assert "connection refused" in (await world.facts()).error
    world.engines[0].faults.unreachable = False
    await world.settle(1.5)
    assert world.board.states() == ["starting"] * 2 + SERVED
    assert (await world.facts()).error == ""
    assert (await world.facts()).version == version


async def test_a_first_version_inspected_before_any_engine_answered_is_looked_at_again(
    world: World, tmp_path: Path
) -> None:
    world.engines[0].faults.unreachable = True
    await world.board.new_trainer_epoch()
    source = write_toy_checkpoint(tmp_path / "shape", 1)
    write_safetensors(source / "model.safetensors", {"model.embed_tokens.weight": floats(1.0, 2.0)})
    half = publish_checkpoint(world.store, source, lambda _, ids: [-1.0] * (len(ids) - 1))
    await announce(world.board, half)
    assert await world.fleet.follow()
    world.engines[0].faults.unreachable = False
    await world.settle(1.5)
    assert "load" not in world.engines[0].calls
    assert "missing (lm_head.weight)" in world.fleet.refused[half.version]
    good = await world.publish(2)
    await world.settle(1.5)
    assert (await world.facts()).version == good.version


async def test_leases_of_engines_that_left_the_run_are_given_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.restore()
    manifest = await world.publish(1)
    await world.settle()
    for holder in ("engine-7", "engine-7.loading", "somebody"):
        world.store.lease(manifest.version, holder)
    world.start()
    await world.restore()
    assert sorted(world.store.leases()) == ["engine-0", "somebody", "target"]


async def test_a_damaged_version_does_not_keep_the_service_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    await world.restore()
    await world.publish(1)
    await world.settle()

    def damaged(version: str) -> Manifest:
        raise IncompleteVersionError(version)

    world.start()
    with monkeypatch.context() as patch:
        patch.setattr(world.store, "manifest", damaged)
        await world.restore()
    await world.publish(2)
    await world.settle()
    assert (await world.facts()).state is EngineState.SERVING


async def test_a_failed_round_and_a_life_that_ended_within_one_leave_a_doubt(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.restore()
    await world.publish(1)
    await world.settle()
    sure = (await world.facts()).doubted_s

    await world.restore()
    assert (await world.facts()).doubted_s == sure, "it was serving, and was proven"

    await world.keepers[0]._quarantine("a round failed")
    failed = (await world.facts()).doubted_s
    await world.settle()
    assert (await world.facts()).doubted_s == failed > sure

    await world.keepers[0]._enter(EngineState.VERIFYING, (await world.facts()).version)
    await world.restore()
    assert (await world.facts()).doubted_s > failed


async def test_a_target_that_no_engine_has_begun_to_load_is_not_collected(world: World) -> None:
    target = await world.publish(1)
    source = world.folder / "seed1"
    for _ in range(3):
        publish_checkpoint(world.store, source, lambda _, ids: [-1.0] * (len(ids) - 1), update=9)
    world.store.collect(1)
    await world.settle()
    assert (await world.facts()).version == target.version


@pytest.mark.parametrize("state", [EngineState.QUIESCED, EngineState.LOADING, EngineState.VERIFYING])
async def test_what_an_engine_serves_is_in_doubt_when_the_board_cuts_its_round_short(
    world: World, state: EngineState
) -> None:
    await world.publish(1)
    await world.settle()
    sure = (await world.facts()).doubted_s
    await world.publish(2)
    world.board.outage_at = state
    with pytest.raises(StreamUnavailableError):
        await world.settle()
    seen = len(world.board.history)
    await world.settle()
    assert (await world.facts()).state is EngineState.SERVING
    assert all(facts.doubted_s > sure for facts in world.board.history[seen:])


async def test_a_round_that_a_board_forgot_is_in_doubt_for_the_next_process(world: World) -> None:
    await world.publish(1)
    await world.settle()
    served = await world.facts()
    await world.publish(2)
    world.board.outage_at = EngineState.VERIFYING
    with pytest.raises(StreamUnavailableError):
        await world.settle()
    await world.board.write_engine(served)
    world.start()
    await world.restore()
    assert (await world.facts()).doubted_s > served.doubted_s


async def test_a_version_whose_log_probs_no_engine_can_compute_is_refused_and_the_last_good_one_serves(
    pair: World,
) -> None:
    good = await pair.publish(1)
    await pair.settle()
    bad = f"v{int(good.version[1:]) + 1:08d}"
    for engine in pair.engines:
        engine.faults.overflow_versions = {bad}
    assert (await pair.publish(2)).version == bad
    await pair.settle()
    assert [(await pair.facts(index)).version for index in range(2)] == [good.version] * 2
    assert [(await pair.facts(index)).in_rotation for index in range(2)] == [True] * 2
    assert "log-prob None" in pair.fleet.refused[bad]


async def test_a_version_that_every_engine_refuses_to_load_leaves_the_last_good_one_serving(pair: World) -> None:
    good = await pair.publish(1)
    await pair.settle()
    bad = f"v{int(good.version[1:]) + 1:08d}"
    for engine in pair.engines:
        engine.faults.refuse_versions = {bad}
    await pair.publish(2)
    await pair.settle()

    async def served() -> list[tuple[str, bool]]:
        facts = [await pair.facts(index) for index in range(2)]
        return [(one.version, one.in_rotation) for one in facts]

    assert await served() == [(good.version, True)] * 2
    assert bad not in pair.fleet.refused, "what refuses it may be mended, like a file system that is not mounted"
    tried = [engine.calls.count("pause") for engine in pair.engines]
    for _ in range(10):
        await pair.settle(10.0)
    again = [(engine.calls.count("pause") - before) for engine, before in zip(pair.engines, tried, strict=True)]
    assert await served() == [(good.version, True)] * 2
    assert all(0 < pauses <= 9 for pauses in again), f"three times in 100 s, each later than the one before: {again}"
    for engine in pair.engines:
        engine.faults.refuse_versions = ()
    await pair.settle(80.0)
    await pair.settle(10.0)
    assert await served() == [(bad, True)] * 2


async def test_an_engine_that_hangs_is_tried_ever_later_and_that_is_said_once(pair: World) -> None:
    """It answers `/model_info` all the time; nothing else tells when it can do more again."""
    await pair.publish(1)
    await pair.settle()
    pair.engines[0].faults.hang = {"generate"}
    failed = metrics.ROUNDS.labels("engine-0", "unreachable")._value
    before = failed.get()
    with capture_logs() as logs:
        version = (await pair.publish(2)).version
        for _ in range(60):
            await pair.settle(10.0)
    said = [line["event"].partition(",")[0] for line in logs if line["log_level"] in {"warning", "error"}]
    assert said == ["round failed", "round failed", "given up for now"]
    assert 5 <= failed.get() - before <= 12, "twice, then after 10, 20, 40 and every 80 s of the 600"
    assert (await pair.facts(1)).version == version
    pair.engines[0].faults.hang = ()
    await pair.settle(80.0)
    assert (await pair.facts(0)).version == version
    assert (await pair.facts(0)).in_rotation


async def test_an_engine_that_answers_again_is_tried_at_once(pair: World) -> None:
    await pair.publish(1)
    await pair.settle()
    pair.engines[0].faults.hang = {"generate"}
    version = (await pair.publish(2)).version
    for _ in range(30):
        await pair.settle(10.0)
    pair.engines[0].faults = Faults(unreachable=True)
    for _ in range(2):
        await pair.settle(1.5)
    pair.engines[0].faults = Faults()
    await pair.settle(1.5)
    assert (await pair.facts(0)).version == version
    assert (await pair.facts(0)).in_rotation


async def test_an_engine_that_fails_the_last_good_version_too_is_left_alone_for_the_cool_down(pair: World) -> None:
    """Each attempt leaves another label behind, which is not a restart."""
    await pair.publish(1)
    await pair.settle()
    pair.engines[0].faults.scramble_load = True
    await pair.publish(2)
    await pair.settle()
    assert (await pair.facts(0)).state is EngineState.QUARANTINED
    loads = pair.engines[0].calls.count("load")
    for _ in range(4):
        await pair.settle(2.0)
    assert pair.engines[0].calls.count("load") == loads


async def test_an_engine_is_looked_at_while_a_version_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a large version takes minutes; meanwhile engines are restarted and boards are emptied."""
    await world.publish(1)
    await world.settle()
    stage, go_on = world.fleet.staging.stage, asyncio.Event()

    async def slowly(version: str, *, local: bool) -> Staged:
        await go_on.wait()
        return await stage(version, local=local)

    monkeypatch.setattr(world.fleet.staging, "stage", slowly)
    monkeypatch.setattr(world.keepers[0], "_settings", dataclasses.replace(world.keepers[0]._settings, probe_s=0.01))
    version = (await world.publish(2)).version
    world.engines[0].restart()
    world.now += 1.5
    await world.keepers[0].step()
    assert "it was restarted" in (await world.facts()).error
    world.board.empty()
    world.now += 1.5
    await world.keepers[0].step()
    assert (await world.facts()).state is EngineState.QUARANTINED
    go_on.set()

    async def serves() -> bool:
        await world.settle(1.5)
        return (await world.facts()).version == version

    await eventually(serves, what="the version that was read")


async def test_a_start_that_finds_the_newest_version_gone_serves_the_one_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = (await world.publish(1)).version
    await world.settle()
    lost = (await world.publish(2)).version
    await world.settle()
    world.start()
    names = world.store.names
    with monkeypatch.context() as patch:
        patch.setattr(world.store, "names", lambda: [name for name in names() if name != lost])
        await world.restore()
        await world.fleet.follow()
        await world.settle()
        assert (await world.facts()).version == good
        await world.fleet.follow()
    await world.fleet.follow()
    await world.settle()
    assert (await world.facts()).version == lost, "it was only late"
