"""Feed reward services so that their queue is never empty, and take what they scored: a process beside them.

`python -m bench.preferences.traffic RUN.toml OUT.json` goes on until its input ends, then writes what it saw.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import sao.board
import sao.streams
from sao.config import RunConfig, load_run_config
from sao.ids import uuid7
from sao.outcome import OUTCOME, Scored
from sao.streams.base import StreamName, TrajectoryStreams
from sao.tasks.base import Prompt
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from sao.tasks.writing import LEXICONS, Writing
from sao.v1 import trajectory_pb2 as pb
from tests.support.rollouts import play

MOST = 1500
"""Entries on the stream: it is filled up to this again and again; far above what all services have in hand."""
AT_ONCE = 64
LOOK_EVERY_S = 0.02


@dataclass
class Traffic:
    """What was seen."""

    appended: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    shortest_queue: int = MOST
    """Entries on the stream at the worst look, those in a service's hands among them."""
    scored: list[tuple[float, int]] = field(default_factory=list)
    """Start of a scoring (Unix seconds) and the version it was under."""
    others: int = 0
    """Outcomes that are no reward."""


async def replay(config: RunConfig, stop: asyncio.Event) -> Traffic:
    """Until `stop`."""
    streams, board = sao.streams.connect(config), sao.board.connect(config)
    epoch = await board.new_trainer_epoch()
    traffic, templates = Traffic(), _templates()
    await streams.open_consumer(StreamName.SCORED, "trainer")
    await _fill(streams, traffic, templates)
    print("filled", flush=True)
    taking = asyncio.ensure_future(_take(streams, traffic, epoch))
    traffic.started_s = time.time()
    while not stop.is_set():
        await _fill(streams, traffic, templates)
        await asyncio.sleep(LOOK_EVERY_S)
    traffic.ended_s = time.time()
    await taking
    await streams.close()
    await board.close()
    return traffic


async def _fill(streams: TrajectoryStreams, traffic: Traffic, templates: list[pb.Trajectory]) -> None:
    length = (await streams.depth(StreamName.TRAJECTORIES)).length
    if traffic.started_s:
        traffic.shortest_queue = min(traffic.shortest_queue, length)
    for first in range(0, MOST - length, AT_ONCE):
        await asyncio.gather(
            *(_append(streams, traffic, templates) for _ in range(min(AT_ONCE, MOST - length - first)))
        )


async def _append(streams: TrajectoryStreams, traffic: Traffic, templates: list[pb.Trajectory]) -> None:
    ordinal, traffic.appended = traffic.appended, traffic.appended + 1
    message = templates[ordinal % len(templates)]
    message.id = uuid7()
    fields = {"task": "writing", "ordinal": str(ordinal)}
    await streams.append(message.id, message.SerializeToString(), ordinal=ordinal, sample=0, fields=fields)


async def _take(streams: TrajectoryStreams, traffic: Traffic, epoch: int) -> None:
    """Until `stop`, and then until what was scored before it has been seen: readers may be behind the scorers."""
    behind = True
    while behind:
        deliveries = await streams.read(StreamName.SCORED, "trainer", count=64, block_ms=100)
        for delivery in deliveries:
            outcome = OUTCOME.validate_json(delivery.fields["outcome"])
            if isinstance(outcome, Scored):
                traffic.scored.append((outcome.scoring_started_s, outcome.scored_under))
            else:
                traffic.others += 1
        if deliveries:
            await streams.settle(deliveries, "trainer", epoch=epoch)
        newest_s = traffic.scored[-1][0] if traffic.scored else 0.0
        behind = not traffic.ended_s or (bool(deliveries) and newest_s < traffic.ended_s)


def _templates() -> list[pb.Trajectory]:
    task = Writing()
    tokenizer = tokenizer_of_run(None, task)
    texts = [" ".join([*words[:10], "<eos>"]) for words in LEXICONS.values()]
    return [play(task, Prompt("p", "moon", {}), tokenizer, [text]).message for text in texts]


async def main(run_file: str) -> Traffic:
    """Replay until standard input ends."""
    stop = asyncio.Event()

    async def until_input_ends() -> None:
        await asyncio.to_thread(sys.stdin.read)
        stop.set()

    ending = asyncio.ensure_future(until_input_ends())
    traffic = await replay(load_run_config(Path(run_file), env={}), stop)
    await ending
    return traffic


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asdict(asyncio.run(main(sys.argv[1])))))
