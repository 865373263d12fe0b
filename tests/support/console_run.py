"""A run as the console finds one: a folder filled by a made-up writing run, and the real reward service over it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import sao.board
import sao.streams
from sao.archive import Archive
from sao.atomic import append_line
from sao.board.base import Board, EngineFacts, EngineState, TrainerFacts, TrainerState, VersionRecord
from sao.config import RunConfig
from sao.outcome import OUTCOME, Scored
from sao.rest import Server
from sao.rows import TrainedRow, UpdateRow
from sao.streams.base import StreamName, TrajectoryStreams
from sao.tasks.base import Prompt
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from sao.tasks.writing import LEXICONS, NEUTRAL, TOPICS, Writing
from sao.telemetry.health import Health
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from sao.v1 import archive_pb2 as pb
from services.reward.app import wire
from services.reward.preferences.routes import ensure_preference
from tests.support.rollouts import play

T = TypeVar("T")
TASK = Writing()
TOKENIZER = tokenizer_of_run(None, TASK)
XSS = "<img src=x onerror=\"document.body.dataset.hacked='yes'\">"


def written(rng: random.Random, style: str, share: float) -> Trajectory:
    """A text about a topic with about this share of words of the style."""
    words = [rng.choice(LEXICONS[style]) if rng.random() < share else rng.choice(NEUTRAL) for _ in range(11)]
    return play(TASK, Prompt("p", rng.choice(TOPICS), {}), TOKENIZER, [" ".join([*words, "<eos>"])])


def trained(
    rng: random.Random, made: Trajectory, update: int, *, preference: int, style: str, at_s: float
) -> pb.TrainedTrajectory:
    """The trajectory as an update trained on it: sampled by two versions, one token masked, one stale."""
    message = made.message
    message.task, message.prompt_id, message.engine_id, message.worker_id = (
        "writing",
        "writing-7",
        "engine-0",
        "worker-0",
    )
    old, new = f"v{max(update - 6, 0):08d}", f"v{update - 1:08d}"
    (segment,) = message.segments
    count = len(segment.token_ids)
    del segment.versions[:]
    segment.versions.add(version=old, start=0, end=1)
    segment.versions.add(version=new, start=1, end=count)
    segment.logprobs[:] = [-rng.expovariate(1.2) for _ in range(count)]
    components = dict(TASK.score(made, TOKENIZER))
    value = TASK.preferences[style].value(components)
    outcome = Scored(components=components, value=value, scored_under=preference, scoring_started_s=at_s)
    ratios = [rng.lognormvariate(0, 0.15) for _ in range(count)]
    weights = [0.0, *ratios[1:]]
    if count > 4:
        ratios[4], weights[4] = 3.2, 0.0
    return pb.TrainedTrajectory(
        trajectory=message,
        outcome_json=OUTCOME.dump_json(outcome).decode(),
        reward=value,
        values=[rng.gauss(0.6, 0.05) for _ in range(count)],
        advantages=[rng.gauss(value - 0.6, 0.25) for _ in range(count)],
        ratios=ratios,
        weights=weights,
        lag=6,
        version_lags={old: 6, new: 1},
        trained_under=preference,
    )


def fill_folder(folder: Path, updates: int = 120, *, switched_at: int = 80, archived: int = 30) -> list[str]:
    """A run that learnt to write cutely, was switched to classical and is recovering; ids in training order."""
    rng = random.Random(7)
    archive = Archive(folder / "archive")
    ids = []
    began_s = time.time() - updates
    for update in range(1, updates + 1):
        at_s = began_s + update
        preference, style = (1, "cute") if update <= switched_at else (2, "classical")
        cute = 0.15 + 0.75 * min(1.0, update / switched_at)
        fading = max(0.0, 1 - (update - switched_at) / 35)
        steps = []
        for _ in range(4):
            chosen, share = (
                ("cute", cute)
                if update <= switched_at
                else rng.choices([("cute", 0.8), ("classical", 0.85)], [fading + 0.02, 1.02 - fading])[0]
            )
            steps.append(
                trained(rng, written(rng, chosen, share), update, preference=preference, style=style, at_s=at_s)
            )
        document = TASK.preferences[style].model_dump_json()
        step = pb.ArchivedUpdate(
            run="r",
            update=update,
            trainer_epoch=1,
            version_before=f"v{update - 1:08d}",
            finished_s=at_s,
            trajectories=steps,
            preference_version=preference,
            preference_json=document,
        )
        if update > updates - archived:
            archive.append(step)
        append_line(folder / "updates.jsonl", row_of(step).model_dump_json().encode())
        ids += [one.trajectory.id for one in steps]
    return ids


def row_of(step: pb.ArchivedUpdate) -> UpdateRow:
    """The line that the trainer writes of this step."""
    rows = []
    for number, one in enumerate(step.trajectories):
        outcome = OUTCOME.validate_json(one.outcome_json)
        assert isinstance(outcome, Scored)
        made = Trajectory(one.trajectory)
        rows.append(
            TrainedRow(
                id=made.id,
                ordinal=4 * step.update + number,
                reward=one.reward,
                scored_under=outcome.scored_under,
                trained_under=one.trained_under,
                scoring_started_s=outcome.scoring_started_s,
                consumed_s=step.finished_s - 0.9 + number / 4,
                lag=one.lag,
                versions=2,
                tokens=len(made.token_ids),
                action_tokens=made.action_count,
                turns=made.turns,
                finish_reason="stop",
                components=outcome.components,
            )
        )
    return UpdateRow(
        update=step.update,
        critic_only=False,
        version=f"v{step.update:08d}",
        trainer_epoch=step.trainer_epoch,
        preference_version=step.preference_version,
        finished_s=step.finished_s,
        trajectories=rows,
        dropped={},
        metrics={"dis_accepted_fraction": 0.91, "explained_variance": 0.62, "entropy": 1.4},
    )


async def fill_stores(config: RunConfig, board: Board, streams: TrajectoryStreams, updates: int = 120) -> str:
    """Facts of trainer, versions and two engines, one trajectory that waits and one dead letter; the letter's id."""
    epoch = await board.new_trainer_epoch()
    parent = None
    for update in range(updates - 20, updates + 1):
        name = f"v{update:08d}"
        await board.announce_version(VersionRecord(name=name, update=update, parent=parent, epoch=epoch))
        parent = name
    await board.write_trainer(
        TrainerFacts(
            epoch=epoch, update=updates, version=parent or "", consumed=4 * updates, state=TrainerState.TRAINING
        )
    )
    for number, state in enumerate([EngineState.SERVING, EngineState.QUARANTINED]):
        error = f"the canary differs {XSS}" if state is EngineState.QUARANTINED else ""
        version = f"v{updates - 9 * number:08d}"
        facts = EngineFacts(
            engine_id=f"engine-{number}",
            url="http://127.0.0.1:1",
            state=state,
            version=version,
            error=error,
            since_s=time.time() - 100,
        )
        await board.write_engine(facts)
    rng = random.Random(11)
    await streams.open_consumer(StreamName.TRAJECTORIES, "reward-0")
    ids = []
    for ordinal in (900, 901):
        made = written(rng, "cute", 0.5)
        made.message.task_payload_json = json.dumps({"wanted": XSS})
        fields = {"task": "writing", "ordinal": str(ordinal)}
        await streams.append(made.id, made.message.SerializeToString(), ordinal=ordinal, sample=0, fields=fields)
        ids.append(made.id)
    (delivery,) = await streams.read(StreamName.TRAJECTORIES, "reward-0", count=1, block_ms=0)
    await streams.bury(delivery, "reward-0", f"invalid: the task cannot score {XSS}")
    return ids[0]


def apart(work: Coroutine[Any, Any, T]) -> T:
    """What it gives, run in a thread of its own: the browser's driver has an event loop in ours."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


@contextlib.contextmanager
def console_of(
    config: RunConfig,
    *,
    tokenizer: Tokenizer = TOKENIZER,
) -> Iterator[str]:
    """The real reward app over the run's real store, in a thread of its own; yields its URL."""
    listener = socket.create_server((config.reward.bind, config.reward.port))
    port = listener.getsockname()[1]
    ready = threading.Event()
    failed: list[BaseException] = []
    handles: list[tuple[asyncio.AbstractEventLoop, Server]] = []

    async def serve() -> None:
        board, streams = sao.board.connect(config), sao.streams.connect(config)
        try:
            await ensure_preference(board, config.preference, TASK)
            app = wire(config, TASK, tokenizer, board=board, streams=streams, health=Health(60.0)).app
            server = Server(app, grace_s=1)
            handles.append((asyncio.get_running_loop(), server))
            ready.set()
            await server.serve(sockets=[listener])
        finally:
            await board.close()
            await streams.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="console", daemon=True)
    thread.start()
    assert ready.wait(20), "the console's server did not start"
    assert not failed, failed
    try:
        yield f"http://{config.reward.bind}:{port}"
    finally:
        for loop, server in handles:
            loop.call_soon_threadsafe(setattr, server, "should_exit", True)
        thread.join(10)
