"""Stop the engine where its keeper is in a state, let the keeper ask it something, kill it, and start it again.

So it dies with a request on its way, whatever the state. The process that comes back has the launch checkpoint, which
the newest version is not.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from sao.board.base import EngineFacts, EngineState
from tests.support.engine import EngineServer, engine_server
from tests.support.steered_weights import after
from tests.support.tiny_checkpoint import make_tiny_checkpoint
from tests.support.valkey import valkey
from tests.support.waiting import eventually
from tests.support.weights_run import PROBE, Trainer, WeightsRun, trainer, weights_run

OUT_WITHIN_S = 5.0
"""From the engine's end until the board says that it serves nobody, and why."""
_LISTEN = "0A"


def prove(state: EngineState, folder: Path) -> dict[str, Any]:
    """Everything of its own in an empty folder: Valkey, the engine (started twice), the weights service."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    checkpoints = make_tiny_checkpoint(folder / "seed0", 0), make_tiny_checkpoint(folder / "seed1", 1)
    with (
        valkey(folder) as url,
        engine_server(checkpoints[0], folder) as engine,
        weights_run(folder, url, engine.url, checkpoints) as run,
    ):
        return asyncio.run(kill_engine_in(state, run, engine))


async def kill_engine_in(state: EngineState, run: WeightsRun, engine: EngineServer) -> dict[str, Any]:
    """What became of it; the engine runs again at the end, and holds the newest version."""
    async with trainer(run) as world:
        await world.learn_checksums()
        await _hold(world, state)
        engine.signal(signal.SIGSTOP)
        run.order("")
        await eventually(lambda: unread(engine.port), what=f"a request of the keeper, see {run.log}", timeout_s=60)
        killed_s = time.monotonic()
        engine.kill()
        dead = await _out_of_rotation(world, engine)
        out_s = time.monotonic() - killed_s
        async with world.looking():
            newest = await _publish_other_than_launched(world)
            await asyncio.to_thread(engine.start)
            answers_s = time.monotonic()
            facts = await world.serves(newest)
        served_s = time.monotonic() - answers_s
        token = await world.engine.generate_one(PROBE)
        problems = [*world.lies, *_problems(run, facts, token.version, out_s)]
        if not await world.holds(newest):
            problems.append(f"the engine holds other weights than {newest}")
    return {
        "passed": not problems,
        "problems": problems,
        "state_then": dead.state.value,
        "reason": dead.error,
        "out_of_rotation_after_s": round(out_s, 3),
        "served_after_s": round(served_s, 3),
    }


async def _hold(world: Trainer, state: EngineState) -> None:
    """Bring the keeper into the state: on its way to a second version, where it is not its first."""
    run = world.run
    first = await world.publish()
    if state is not EngineState.STARTING:
        run.start()
        await world.serves(first.version)
    run.order(f"hold {after(state)}")
    if state is EngineState.STARTING:
        run.start()
    else:
        await world.publish()
    await eventually(lambda: run.held, what=f"the keeper to be {state.value}, see {run.log}", timeout_s=60)
    found = (await world.facts()).state
    if found is not state:
        msg = f"the board says {found.value}, expected {state.value}: see {run.log}"
        raise AssertionError(msg)


def unread(port: int) -> bool:
    """Whether bytes wait for whoever listens on this port of the loopback."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, queues, *_ = line.split()
        waiting = int(queues.partition(":")[2], 16)
        if int(local.rpartition(":")[2], 16) == port and state != _LISTEN and waiting > 0:
            return True
    return False


async def _out_of_rotation(world: Trainer, engine: EngineServer) -> EngineFacts:
    found: list[EngineFacts] = []

    async def out() -> bool:
        facts = await world.facts()
        found[:] = [facts]
        return not facts.in_rotation and engine.url in facts.error

    await eventually(out, what=f"a dead engine to be out of rotation, see {world.run.log}", timeout_s=60)
    return found[0]


async def _publish_other_than_launched(world: Trainer) -> str:
    """While nobody can load it: a version whose weights the engine does not start with."""
    manifest = await world.publish()
    if world.run.is_launched(manifest.version):
        manifest = await world.publish()
    return manifest.version


def _problems(run: WeightsRun, facts: EngineFacts, label: str, out_s: float) -> list[str]:
    newest, found = run.newest.version, []
    if out_s > OUT_WITHIN_S:
        found.append(f"in rotation, or without a reason, for {out_s:.1f} s after its end")
    if label != newest or facts.verified[-1] != newest:
        found.append(f"serves {label}, verified {facts.verified}, expected {newest}")
    if not run.lives:
        found.append(f"the weights service ended, see {run.log}")
    if "Traceback" in run.log.read_text():
        found.append(f"a traceback in {run.log}")
    return found
