"""`sao forget` on a run with text in every place, a real Valkey and its files among them: nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner, Result

from sao.archive import Archive
from sao.board.redis import RedisBoard
from sao.cli.main import app
from sao.config import RunConfig, dump_run_config, load_run_config
from sao.outcome import OUTCOME, Scored
from sao.redis_client import RunKeys, connect_redis
from sao.streams.base import AppendStatus, StreamName
from sao.streams.redis import RedisStreams
from sao.streams.room import Feedback
from sao.supervisor.folder import RunFolder
from sao.tasks.calculator import Calculator
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from sao.v1 import archive_pb2, ingest_pb2, trajectory_pb2
from services.rollout.folder import TrajectoryFolder
from services.trainer.consumer import Consumer, Position, Refused
from tests.support.processes import free_port, wait_until
from tests.support.stores import claim
from tests.support.trajectories import LIMITS, good
from tests.support.valkey import valkey

OTHER = "what-another-person-wrote"
MARK = "marker-text-of-a-person"
SECRET_IDS = [9, 8, 7, 6, 5, 9, 8, 7, 6, 5, 11, 12]
SCORED = OUTCOME.dump_json(
    Scored(components={"correct": 1.0}, value=1.0, scored_under=1, scoring_started_s=1.0)
).decode()


@pytest.fixture
def config(tmp_path: Path) -> Iterator[RunConfig]:
    """A run whose store writes its files into the run's folder, as that of `sao up` does."""
    root = tmp_path / "run"
    (root / "valkey").mkdir(parents=True)
    with valkey(root / "valkey", "--rdbcompression", "no") as url:
        with redis.Redis.from_url(url) as client:
            claim(client, RunKeys("private"))
        made = load_run_config(None, ["run.name=private", f'run.dir="{root}"', f'redis.url="{url}"'], env={})
        RunFolder(root).run_file.write_text(dump_run_config(made))
        yield made


def written(number: int, *, mark: str = MARK) -> trajectory_pb2.Trajectory:
    """A trajectory with the marker in prompt, observation and payload; with another one, only there."""
    message = good(random.Random(number), ordinal=number)
    message.run = "private"
    message.task_payload_json = json.dumps({"answer": {"who": [f"{mark} {number}"]}})
    if mark == MARK:
        message.prompt_token_ids[:] = SECRET_IDS
        message.segments[1].token_ids[:] = SECRET_IDS
    return message


async def fill(config: RunConfig) -> dict[str, str]:
    """Text in each place that there is; id of the trajectory by place."""
    streams = RedisStreams.connect(config)
    messages = {
        place: written(number)
        for number, place in enumerate(
            ("waiting", "dead letter", "training", "read", "unread", "archive", "spool", "dead folder")
        )
    }
    messages |= {"kept": written(8, mark=OTHER), "kept letter": written(9, mark=OTHER)}
    for place in ("waiting", "dead letter", "kept letter", "training", "read", "unread", "kept"):
        one = messages[place]
        accepted = await streams.append(
            one.id,
            one.SerializeToString(),
            ordinal=one.ordinal,
            sample=0,
            fields={"task": one.task, "ordinal": str(one.ordinal)},
            routed_experts=one.task_payload_json.encode(),
        )
        assert accepted is AppendStatus.ACCEPTED
    await streams.open_consumer(StreamName.TRAJECTORIES, "r")
    first, second, neighbour, third, _ = await streams.read(StreamName.TRAJECTORIES, "r", count=5, block_ms=0)
    assert await streams.room.park(first, "r", {"note": MARK}, now_ms=1)
    await streams.room.answer(first.trajectory_id, Feedback(value=1.0, at_ms=2, author=MARK), kept_max=9)
    assert await streams.bury(second, "r", f"invalid: {MARK}")
    assert await streams.bury(neighbour, "r", f"invalid: {OTHER}")
    assert await streams.move(third, "r", StreamName.SCORED, {**third.fields, "outcome": SCORED})
    await streams.close()

    on_disk(config.run.dir, messages)
    return {place: message.id for place, message in messages.items()}


def on_disk(root: Path, messages: dict[str, trajectory_pb2.Trajectory]) -> None:
    for epoch in (1, 2):
        trained = [
            archive_pb2.TrainedTrajectory(
                trajectory=messages[place], outcome_json=SCORED, reward=0.25, lag=3, values=[0.5], ratios=[1.5]
            )
            for place in ("archive", "kept")
        ]
        for one in trained:
            one.routed_experts = one.trajectory.task_payload_json.encode()
        step = archive_pb2.ArchivedUpdate(run="private", update=4, trainer_epoch=epoch, trajectories=trained)
        Archive(root / "archive").append(step)
    spool, dead = TrajectoryFolder(root / "spool" / "worker-7"), TrajectoryFolder(root / "dead")
    request = ingest_pb2.PublishRequest(trajectory=messages["spool"])
    spool.put(request)
    (spool.path / f"{messages['spool'].id}.torn").write_bytes(request.SerializeToString()[:-4])
    dead.put(ingest_pb2.PublishRequest(trajectory=messages["dead folder"]), f"INVALID_ARGUMENT: {MARK}")

    said = tokenizer_of_run(None, Calculator()).decode(SECRET_IDS)
    lines = [
        json.dumps({"event": "scorer failed", "trajectory": messages["read"].id, "exception": f"what\n{MARK} 3\nis"}),
        json.dumps({"event": "taken", "trajectory": messages["training"].id, "tokens": 9}),
        f"  a traceback of {messages['unread'].id}",
        f"a library repeats {MARK} 5 without saying whose",
        json.dumps({"event": "said", "text": said}),
        f"token ids [{', '.join(map(str, SECRET_IDS))}]",
        json.dumps({"event": "harmless", "number": 1}),
    ]
    (root / "logs").mkdir()
    (root / "logs" / "reward.log").write_text("\n".join(lines) + "\nhalf a li")


def sao(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["forget", *map(str, arguments)])


def traces(config: RunConfig) -> list[str]:
    """Where the marker, or the secret token ids, still are in files and keys of the run."""
    sought = [MARK.encode(), bytes(SECRET_IDS), b", ".join(b"%d" % one for one in SECRET_IDS)]
    sought.append(tokenizer_of_run(None, Calculator()).decode(SECRET_IDS).encode())
    found = []
    for path in config.run.dir.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            found += [f"{path.relative_to(config.run.dir)}: {one!r}" for one in sought if one in data]
    with redis.Redis.from_url(config.redis.url) as client:
        for key in client.scan_iter():
            data = client.dump(key)
            found += [f"{key.decode()}: {one!r}" for one in sought if one in data]
    return found


def test_after_forgetting_no_file_and_no_key_holds_the_text(config: RunConfig) -> None:
    ids = asyncio.run(fill(config))
    kept, _ = ids.pop("kept"), ids.pop("kept letter")
    before = traces(config)
    for place in ("archive/", "spool/", "dead/", "logs/", "valkey/appendonlydir", "payload", ":dead", "waiting"):
        assert any(place in one for one in before), (place, before)

    told = sao(config.run.dir, *ids.values())
    assert told.exit_code == 0, told.output
    wait_until(lambda: not traces(config), timeout_s=10, what="the server to remove its old files")
    assert "erased 5 payload" not in told.output, "the dead letter's went with it"
    for part in (
        "erased 4 payload, 4 routed experts, 1 waiting, 1 answers, 1 dead letters, 3 entries",
        "archive  erased 2 steps",
        "spool  erased 2 files",
        "dead  erased 2 files",
        "logs  erased 5 lines",
    ):
        assert part in told.output, told.output

    # Numbers stay, so do the others; a log keeps its length and its last, unfinished line.
    for step in Archive(config.run.dir / "archive").read_history(4):
        gone, other = step.trajectories
        assert (gone.forgotten, gone.reward, gone.lag, list(gone.values), list(gone.ratios)) == (
            True, 0.25, 3, [0.5], [1.5],
        )  # fmt: skip
        assert gone.trajectory.id == ids["archive"]
        assert len(gone.trajectory.segments[0].logprobs) > 0
        assert OTHER in other.trajectory.task_payload_json
        assert not other.forgotten
    log = (config.run.dir / "logs" / "reward.log").read_text()
    assert json.loads(log.splitlines()[1])["tokens"] == 9
    assert log.endswith('{"event": "harmless", "number": 1}\nhalf a li')
    with redis.Redis.from_url(config.redis.url) as client:
        assert OTHER.encode() in client.get(RunKeys("private").payload(kept))

    again = sao(config.run.dir, *ids.values(), "--json")
    assert again.exit_code == 0
    assert [finding["erased"] for finding in json.loads(again.output)] == [{}] * 5, again.output


async def test_services_at_work_lose_nothing_and_train_nothing_without_its_text(config: RunConfig) -> None:
    ids = await fill(config)
    streams = RedisStreams.connect(config)
    board = RedisBoard(connect_redis(config.redis), RunKeys("private"))
    epoch = await board.new_trainer_epoch()
    await streams.open_consumer(StreamName.TRAJECTORIES, "r")
    (read,) = [
        one
        for one in await streams.read(StreamName.TRAJECTORIES, "r", count=9, block_ms=0)
        if one.trajectory_id == ids["read"]
    ]
    told = await asyncio.to_thread(
        sao, config.run.dir, *(ids[name] for name in ("waiting", "training", "read", "spool"))
    )
    assert told.exit_code == 0, told.output

    # The reward service comes to its score a moment too late: the fence turns it away.
    assert not await streams.move(read, "r", StreamName.SCORED, {"outcome": SCORED})
    consumer = Consumer(streams, board, config.trainer, LIMITS, epoch=epoch)
    await consumer.open()
    refused = [await consumer.take(Position("", 0), block_ms=0) for _ in range(3)]
    assert {(one.trajectory_id, one.reason) for one in refused if isinstance(one, Refused)} == {
        (ids[name], "forgotten") for name in ("waiting", "training", "read")
    }
    assert consumer.dropped == {"forgotten": 3}
    assert await consumer.take(Position("", 0), block_ms=0) is None
    assert await streams.unconsumed() == 2, "unread and kept"

    # A worker that offers it from its memory is told that it is here already, and lets go of it.
    late = written(6)
    status = await streams.append(ids["spool"], late.SerializeToString(), ordinal=6, sample=0, fields={})
    assert status is AppendStatus.DUPLICATE
    # A trainer that has it in its hands archives the numbers alone.
    step = archive_pb2.ArchivedUpdate(run="private", update=9, trainer_epoch=9)
    step.trajectories.add(reward=1.0).trajectory.MergeFrom(written(3))
    step.trajectories[0].trajectory.id = ids["read"]
    path = Archive(config.run.dir / "archive").append(step)
    assert MARK.encode() not in path.read_bytes()
    await streams.close()


def test_a_place_that_cannot_be_reached_is_named_and_the_others_are_done(config: RunConfig) -> None:
    ids = asyncio.run(fill(config))
    away = config.model_copy(
        update={"redis": config.redis.model_copy(update={"url": f"redis://:hush@127.0.0.1:{free_port()}/0"})}
    )
    RunFolder(config.run.dir).run_file.write_text(dump_run_config(away))
    told = sao(RunFolder(config.run.dir).run_file, ids["archive"])
    assert told.exit_code == 1
    assert "NOT DONE: read payload" in told.output
    assert "hush" not in told.output
    assert "archive  erased 2 steps" in told.output
    assert sao(config.run.dir, ids["archive"], "--place", "archive").exit_code == 0

    elsewhere = config.model_copy(update={"run": config.run.model_copy(update={"dir": config.run.dir / "not-here"})})
    RunFolder(config.run.dir).run_file.write_text(dump_run_config(elsewhere))
    told = sao(config.run.dir, ids["dead letter"])
    assert told.exit_code == 1
    assert told.output.count("is not on this machine") == 4
    assert "1 dead letters" in told.output


@pytest.mark.parametrize(("arguments", "problem"), [(["nowhere", "x"], "does not exist"), ([".", "x"], "run.toml")])
def test_wrong_arguments_end_with_2(arguments: list[str], problem: str, tmp_path: Path) -> None:
    told = sao(tmp_path / arguments[0], arguments[1])
    assert (told.exit_code, problem in told.output) == (2, True)


def test_an_id_of_another_kind_is_refused(config: RunConfig) -> None:
    told = sao(config.run.dir, "../../etc/passwd")
    assert told.exit_code == 2
    assert "expected a lower-case UUIDv7" in told.output
