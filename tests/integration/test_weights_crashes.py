"""The weights service killed (SIGKILL) at every state of an engine: its successor proves the newest version anew.

Then the store that comes back empty: it is told again, and nothing is proven anew.

Real service processes, Valkey and SGLang. Versions alternate between two checkpoints, so the weights of any other
version than the newest are wrong, and the engine's checksums tell.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from sao.board.base import EngineState
from sao.redis_client import RunKeys
from tests.support.engine import EngineServer
from tests.support.steered_weights import HALF_LOADED, IN_FLIGHT, UNFLUSHED, after, before
from tests.support.weights_run import PROBE, Trainer, WeightsRun, oracle, trainer, weights_run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

STARTING, SERVING, QUARANTINED = EngineState.STARTING, EngineState.SERVING, EngineState.QUARANTINED
QUIESCING, QUIESCED = EngineState.QUIESCING, EngineState.QUIESCED
LOADING, VERIFYING = EngineState.LOADING, EngineState.VERIFYING

CRASHES: dict[str, EngineState] = {
    before(STARTING): SERVING,
    after(STARTING): STARTING,
    before(QUIESCING): SERVING,
    after(QUIESCING): QUIESCING,
    before(QUIESCED): QUIESCING,
    after(QUIESCED): QUIESCED,
    after(LOADING): LOADING,
    IN_FLIGHT: LOADING,
    UNFLUSHED: LOADING,
    HALF_LOADED: LOADING,
    before(VERIFYING): LOADING,
    after(VERIFYING): VERIFYING,
    before(SERVING): VERIFYING,
    after(SERVING): SERVING,
    before(QUARANTINED): VERIFYING,
    after(QUARANTINED): QUARANTINED,
}
"""By point: what the board says from the kill until the successor's first word."""


@pytest.fixture(scope="module")
def run(
    valkey_url: str,
    sglang_engine: EngineServer,
    tiny_checkpoints: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[WeightsRun]:
    """One run for all rows: each row's successor is the next one's victim."""
    folder = tmp_path_factory.mktemp("weights")
    with weights_run(folder, valkey_url, sglang_engine.url, tiny_checkpoints) as made:
        yield made
    sglang_engine.load_launched()


@pytest.fixture
async def world(run: WeightsRun) -> AsyncIterator[Trainer]:
    """A living service whose engine serves the newest version."""
    async with trainer(run) as made:
        run.order("")
        if not run.published:
            await made.learn_checksums()
            await made.publish()
        if not run.lives:
            run.start()
        await made.serves(run.newest.version)
        yield made


@pytest.mark.parametrize("point", CRASHES)
async def test_the_successor_brings_the_engine_to_the_newest_version(world: Trainer, point: str) -> None:
    run, said = world.run, CRASHES[point]
    old = run.newest
    async with world.looking():
        if point in {before(STARTING), after(STARTING)}:
            run.kill()
            run.order(f"kill {point}")
            newest = await world.publish()
            run.start()
        else:
            run.order(f"kill {point}")
            newest = await world.publish()
        assert await run.died() == -signal.SIGKILL, f"see {run.log}"
        died_s = time.time()

        facts = await world.facts()
        assert facts.state is said
        if facts.in_rotation:
            assert await world.holds(facts.version)
            assert facts.version == (newest.version if point == after(SERVING) else old.version)

        run.order("")
        run.start()
        facts = await world.serves(newest.version, since_s=died_s)
    assert world.lies == []
    assert facts.verified[-1] == newest.version
    assert await world.holds(newest.version)
    token = await world.engine.generate_one(PROBE)
    assert token.version == newest.version
    (scored,) = await world.engine.score([PROBE])
    assert scored == pytest.approx(oracle(run.sources[newest.version], PROBE), abs=1e-5)
    for trouble in ("Traceback", "round failed"):
        assert trouble not in run.log.read_text(), f"of the successor, see {run.log}"


async def test_a_store_that_was_emptied_is_told_again_and_the_engine_goes_on(world: Trainer) -> None:
    run, before_it = world.run, await world.facts()
    client = redis.Redis.from_url(run.config.redis.url)
    keys = RunKeys(run.config.run.name)
    async with world.looking():
        with contextlib.closing(client):
            client.delete(keys.board, keys.versions, keys.engines)
            client.script_flush()
        found = await world.serves(run.newest.version)
        assert found == before_it, "it was in rotation all the time, and nothing was loaded"
        await world.board.new_trainer_epoch()
        newest = await world.publish()
        await world.serves(newest.version)
    assert world.lies == []
    assert await world.holds(newest.version)
    assert run.lives


async def test_the_witness_notices_what_is_not_true(world: Trainer) -> None:
    """Nobody writes while no service lives, so what is put on the board stays there."""
    world.run.kill()
    true, other = await world.facts(), await world.publish()
    await world.board.write_engine(true)
    await world.look()
    assert world.lies == []
    await world.board.write_engine(true.model_copy(update={"version": other.version}))
    await world.look()
    assert world.lies == [f"{other.version} is said to be served, but the weights are others"]
