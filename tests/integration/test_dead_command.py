"""`sao dead` on a run folder and on a run file, with a real Valkey behind them."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from typer.testing import CliRunner, Result

from sao import streams as trajectory_streams
from sao.cli.main import app
from sao.config import RunConfig, dump_run_config
from sao.outcome import OUTCOME, Scored
from sao.streams.base import DeadEvent, StreamName, TrajectoryStreams
from sao.streams.redis import RedisStreams
from sao.supervisor.folder import RunFolder
from sao.tasks.calculator import Calculator
from sao.tasks.tiny_tokenizer import build_tokenizer_json
from sao.weights.filesystem import FileSystemVersionStore
from tests.support.processes import free_port
from tests.support.trajectories import good
from tests.support.versions import publish_checkpoint, write_toy_checkpoint

T = TypeVar("T")
OUTCOME_JSON = OUTCOME.dump_json(
    Scored(components={"correct": 1.0, "brevity": 0.5}, value=1.25, scored_under=3, scoring_started_s=1.0)
).decode()
TRAJECTORIES, SCORED = StreamName.TRAJECTORIES, StreamName.SCORED


@pytest.fixture
def folder(run_config: RunConfig) -> Path:
    """A run's folder whose store is up."""
    root = run_config.run.dir
    root.mkdir(parents=True)
    RunFolder(root).run_file.write_text(dump_run_config(run_config))
    return root


def sao(*arguments: object, answer: str = "") -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["dead", *map(str, arguments)], input=answer)


def asked(config: RunConfig, question: Callable[[TrajectoryStreams], Awaitable[T]]) -> T:
    """The answer of the run's streams."""

    async def ask() -> T:
        streams = trajectory_streams.connect(config)
        try:
            return await question(streams)
        finally:
            await streams.close()

    return asyncio.run(ask())


def buried(config: RunConfig, *reasons: str, stream: StreamName = TRAJECTORIES) -> list[str]:
    """Ids of new trajectories that died of these reasons."""

    async def bury(streams: TrajectoryStreams) -> list[str]:
        ids = []
        for number, reason in enumerate(reasons):
            message = good(random.Random(number), ordinal=number)
            fields = {"task": message.task}
            await streams.append(message.id, message.SerializeToString(), ordinal=number, sample=0, fields=fields)
            await streams.open_consumer(TRAJECTORIES, "r")
            (delivery,) = await streams.read(TRAJECTORIES, "r", count=1, block_ms=0)
            if stream is SCORED:
                await streams.move(delivery, "r", SCORED, {**delivery.fields, "outcome": OUTCOME_JSON})
                await streams.open_consumer(SCORED, "r")
                (delivery,) = await streams.read(SCORED, "r", count=1, block_ms=0)
            assert await streams.bury(delivery, "r", reason)
            ids.append(message.id)
        return ids

    return asked(config, bury)


def letters(config: RunConfig) -> list[str]:
    """Ids of the dead letters that there are, newest first."""
    found = asked(config, lambda streams: streams.dead_letters(count=100))
    return [letter.trajectory_id for letter in found]


def test_a_list_shows_the_newest_first_with_reason_age_and_task(folder: Path, run_config: RunConfig) -> None:
    first, second, third = buried(run_config, "invalid: a", "timeout: b took longer than 10 s", "invalid: c")
    shown = sao("list", folder)
    assert shown.exit_code == 0
    assert re.findall(r"^[0-9a-f-]{36}", shown.output, re.MULTILINE) == [third, second, first]
    assert re.search(rf"{second} +trajectories +1 +\d+ s +count +timeout: b took longer than 10 s", shown.output)
    assert "buried          3  invalid 2, timeout 1" in shown.output
    assert f"`sao dead show {folder} ID`" in shown.output

    assert second in sao("list", folder, "--reason", "timeout").output
    assert first not in sao("list", folder, "--reason", "timeout").output
    newest = sao("list", "--config", RunFolder(folder).run_file, "--limit", 1)
    assert (third in newest.output, first in newest.output) == (True, False)
    assert "1 of 3" in newest.output
    rows = json.loads(sao("list", folder, "--json").output)
    assert [row["trajectory_id"] for row in rows] == [third, second, first]
    assert (rows[1]["kind"], rows[1]["stream"], rows[1]["fields"]) == ("timeout", "trajectories", {"task": "count"})


def test_a_run_without_dead_letters_says_so(folder: Path) -> None:
    assert "no dead letters" in sao("list", folder).output


def test_show_tells_why_how_it_was_scored_and_what_was_said(folder: Path, run_config: RunConfig) -> None:
    (trajectory_id,) = buried(run_config, "damaged: version unknown", stream=SCORED)
    shown = sao("show", folder, trajectory_id)
    assert shown.exit_code == 0, shown.output
    for part in (
        "stream scored, delivery 1",
        "damaged: version unknown",
        "reward 1.25 under preference 3 (brevity 0.5, correct 1)",
        "count, prompt p0",
        "ordinal 0, sample 0",
        "on engine-0, worker worker-0",
        "no tokenizer under",
        f"sao dead requeue {folder} {trajectory_id}",
    ):
        assert part in shown.output

    store = FileSystemVersionStore(run_config.versions_dir, min_free_bytes=0)
    source = write_toy_checkpoint(folder / "toy", 0)
    (source / "tokenizer.json").write_text(build_tokenizer_json(Calculator()))
    publish_checkpoint(store, source, lambda _, ids: [0.0] * (len(ids) - 1))
    with_text = sao("show", folder, trajectory_id).output
    assert re.search(r"^action +\S", with_text, re.MULTILINE)
    assert "no tokenizer" not in with_text

    body = json.loads(sao("show", "--config", RunFolder(folder).run_file, trajectory_id, "--json").output)
    assert body["trajectory"]["id"] == trajectory_id
    assert body["trajectory"]["segments"][0]["kind"] == "SEGMENT_KIND_ACTION"
    assert body["damage"] == ""


def test_show_says_when_the_payload_is_gone_and_requeue_refuses_it(folder: Path, run_config: RunConfig) -> None:
    lost, _ = buried(run_config, "invalid: x", "invalid: x")

    async def lose(streams: TrajectoryStreams) -> None:
        assert isinstance(streams, RedisStreams)
        await streams._client.delete(streams._keys.payload(lost))

    asked(run_config, lose)
    assert "gone from the store" in sao("show", folder, lost).output
    assert "is refused" in sao("show", folder, lost).output
    requeued = sao("requeue", folder, "--all")
    assert requeued.exit_code == 1
    assert "requeued 1: invalid 1" in requeued.output
    assert f"{lost}: its payload is gone, it can only be dropped" in requeued.output
    assert letters(run_config) == [lost]
    assert asked(run_config, lambda streams: streams.unconsumed()) == 1


def test_requeue_takes_ids_or_a_reason_and_says_what_is_missing(folder: Path, run_config: RunConfig) -> None:
    first, second, third = buried(run_config, "timeout: a", "invalid: b", "timeout: c")
    by_reason = sao("requeue", folder, "--reason", "timeout")
    assert (by_reason.exit_code, by_reason.output) == (0, "requeued 2: timeout 2\n")
    assert letters(run_config) == [second]
    by_id = sao("requeue", folder, second, first)
    assert by_id.exit_code == 1
    assert "requeued 1: invalid 1" in by_id.output
    assert f"{first}: no dead letter of this run; `sao dead list {folder}`" in by_id.output

    async def waiting(streams: TrajectoryStreams) -> list[str]:
        await streams.open_consumer(TRAJECTORIES, "r")
        return [delivery.trajectory_id for delivery in await streams.read(TRAJECTORIES, "r", count=9, block_ms=0)]

    assert asked(run_config, waiting) == [first, third, second], "oldest first"


def test_drop_asks_before_it_deletes_many(folder: Path, run_config: RunConfig) -> None:
    first, second, third = buried(run_config, "timeout: a", "invalid: b", "invalid: c")
    assert sao("drop", folder, first).output == "dropped 1: timeout 1\n"
    refused = sao("drop", folder, "--all", answer="n\n")
    assert refused.exit_code == 1
    assert "Delete all dead letters" in refused.output
    assert letters(run_config) == [third, second]
    assert sao("drop", folder, "--reason", "invalid", answer="y\n").exit_code == 0
    assert letters(run_config) == []
    assert asked(run_config, lambda streams: streams.payload(third)) is None
    totals = asked(run_config, lambda streams: streams.dead_totals())
    assert totals.counts[DeadEvent.DROPPED] == {"timeout": 1, "invalid": 2}
    assert sao("drop", folder, "--all", "--yes").output == "dropped 0\n"


@pytest.mark.parametrize("command", ["requeue", "drop"])
def test_which_letters_are_meant_is_said_in_one_way(folder: Path, command: str) -> None:
    for arguments in ([], ["some-id", "--all"], ["--all", "--reason", "x"]):
        refused = sao(command, folder, *arguments)
        assert refused.exit_code == 2
        assert "trajectory ids, --reason TEXT, or --all" in refused.output


def test_what_is_no_run_is_refused_with_what_to_name(tmp_path: Path, folder: Path) -> None:
    for arguments, words in (
        (["list"], "Name its folder, or a run file with --config"),
        (["list", tmp_path / "nothing"], "run.toml does not exist: name the folder of a run"),
        (["list", "other", "--config", RunFolder(folder).run_file], "two runs"),
        (["show", folder], "0 ids, expected one"),
    ):
        refused = sao(*arguments)
        assert refused.exit_code == 2
        assert words in refused.output
    missing = sao("show", folder, "0198-none")
    assert missing.exit_code == 1
    assert f"0198-none: no dead letter of this run; `sao dead list {folder}`" in missing.output


def test_a_store_that_is_down_is_named_with_what_starts_it(folder: Path, run_config: RunConfig) -> None:
    section = run_config.redis.model_copy(update={"url": f"redis://127.0.0.1:{free_port()}/0"})
    RunFolder(folder).run_file.write_text(dump_run_config(run_config.model_copy(update={"redis": section})))
    down = sao("list", folder)
    assert down.exit_code == 1
    assert "the store did not answer" in down.output
    assert "sao up --run-dir RUN" in down.output


def test_help_says_what_to_do_first() -> None:
    assert "Once the cause is mended" in sao("--help").output
    assert "Examples" in sao("requeue", "--help").output
