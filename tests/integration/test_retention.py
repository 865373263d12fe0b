"""Every owner of a place looks once at a run with text everywhere: what is over its time is in no file and no key."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import redis

from sao.archive import Archive
from sao.config import RunConfig
from sao.config.schema import CheckpointSection, RetentionSection
from sao.redis_client import RunKeys
from sao.streams.base import StreamName
from sao.streams.redis import RedisStreams
from sao.supervisor.folder import RunFolder
from sao.supervisor.log_retention import LogRetention
from services.rollout import app as rollout
from services.rollout.ingest import app as ingest
from services.rollout.ingest import metrics as ingest_metrics
from services.trainer import app as trainer
from services.trainer.checkpoint import CheckpointStore, Stretch
from services.trainer.loop import fresh_progress
from tests.integration.test_forget_command import MARK, OTHER, config, fill, traces
from tests.support.processes import wait_until
from tests.support.waiting import eventually

__all__ = ["config"]

AT_ONCE_H = 1e-6


def checkpointed(config: RunConfig) -> CheckpointStore:
    """A checkpoint that holds update 4 of epoch 2; epoch 1 is abandoned."""
    store = CheckpointStore(config.run.dir / "checkpoints", config.run.name, 3, 0, 0)
    stretch = Stretch(trainer_epoch=2, update=4, critic_only=0)
    progress = fresh_progress(config.run.name).model_copy(
        update={"update": 4, "trainer_epoch": 2, "stretches": [stretch]}
    )
    store.save(progress, lambda folder: None)
    return store


async def look(config: RunConfig) -> None:
    """As each owner does when it starts, and every so often."""
    streams = RedisStreams.connect(config)
    archive = Archive(config.run.dir / "archive")
    kept = checkpointed(config)
    progress = kept.oldest_progress()
    assert progress is not None
    await trainer.retention_of(config, archive, kept, progress, epoch=3).once()
    await ingest.retention_of(config, streams).once()
    await rollout.retention_of(config).once()
    await streams.close()
    logs = LogRetention(RunFolder(config.run.dir), config.retention.logs_h)
    assert logs.look() == ""
    wait_until(lambda: not logs.at_work, timeout_s=10, what="the pass over the logs to end")
    assert logs.look() == ""


def test_what_is_over_its_time_is_nowhere_and_what_waits_is_untouched(config: RunConfig) -> None:
    ids = asyncio.run(fill(config))
    at_once = RetentionSection(**dict.fromkeys(RetentionSection.model_fields, AT_ONCE_H))
    checkpoint = CheckpointSection(keep_every=0)
    config = config.model_copy(update={"retention": at_once, "checkpoint": checkpoint})
    before = traces(config)
    for place in ("archive/", "dead/", "logs/", ".torn", ":dead"):
        assert any(place in one for one in before), (place, before)
    passes = failures()
    made_s = time.time()
    wait_until(lambda: time.time() - made_s > 3600 * AT_ONCE_H, timeout_s=5, what="the time to be over")

    asyncio.run(look(config))

    letters = f"{MARK} 1".encode(), f"{OTHER} 9".encode()
    left = [path for path in valkey_files(config) if any(text in read(path) for text in letters)]
    wait_until(lambda: not any(path.exists() for path in left), timeout_s=10, what="the server to remove its old files")
    after = traces(config)
    there = {one.partition(": ")[0] for one in after if not one.startswith("valkey/")}
    waiting = {f"sao:{{private}}:payload:{ids[name]}" for name in ("waiting", "training", "read", "unread")}
    waiting |= {f"sao:{{private}}:routed-experts:{ids[name]}" for name in ("waiting", "training", "read", "unread")}
    spooled = f"spool/worker-7/{ids['spool']}.pb"
    assert {one for one in there if "payload" in one or "routed" in one or "/" in one} <= waiting | {spooled}
    assert {f"sao:{{private}}:payload:{ids[name]}" for name in ("waiting", "read")} <= there, (
        "it is still to be trained"
    )
    assert spooled in there
    assert not any(one.endswith(":dead") for one in there)
    for step in Archive(config.run.dir / "archive").read_history(4):
        assert [(one.forgotten, one.reward, one.lag) for one in step.trajectories] == [(True, 0.25, 3)] * 2
    assert failures() == passes


async def test_of_a_forgotten_letter_nothing_is_left_beside_the_others(config: RunConfig) -> None:
    """The store keeps a deleted entry's text in the memory of the entries around it."""
    await fill(config)
    streams = RedisStreams.connect(config)
    moment = max(letter.buried_ms for letter in await streams.dead_letters(count=2))
    await eventually(lambda: time.time_ns() // 1_000_000 > moment, what="another millisecond")
    await streams.open_consumer(StreamName.TRAJECTORIES, "another")
    (unread, _) = await streams.read(StreamName.TRAJECTORIES, "another", count=9, block_ms=0)
    assert await streams.bury(unread, "another", f"invalid: {OTHER}")
    (later,) = await streams.dead_letters(count=1)
    with redis.Redis.from_url(config.redis.url) as client:
        key = RunKeys("private").dead
        assert MARK.encode() in client.dump(key)
        assert await streams.forget_dead_before(later.buried_ms) == 2
        left = client.dump(key)
    await streams.close()
    assert MARK.encode() not in left
    assert OTHER.encode() in left


def failures() -> float:
    return float(ingest_metrics.RETENTION_FAILED.labels("dead_letters")._value.get())


def valkey_files(config: RunConfig) -> list[Path]:
    return [path for path in (config.run.dir / "valkey").rglob("*") if path.is_file()]


def read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
