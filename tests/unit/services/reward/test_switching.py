"""A preference changed under load: what starts after the 200 carries the new version."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx

from sao.board.memory import MemoryBoard
from sao.outcome import Scored
from sao.preference import PreferenceDocument
from sao.streams.memory import MemoryStreams
from sao.tasks.calculator import Calculator
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from tests.support.reward_app import wired
from tests.support.scored_tasks import always, append, scored
from tests.unit.services.reward.test_consumer import consuming

WANT_STYLE = PreferenceDocument(name="second", weights={"style": 1.0})


async def test_every_scoring_that_starts_after_the_answer_carries_the_new_version(tmp_path: Path) -> None:
    streams, board = MemoryStreams(), MemoryBoard()
    task = always(correct=1.0, style=0.25)
    await board.put_preference(task.default_preference)
    app = wired(task, tmp_path, board=board, streams=streams, tokenizer=tokenizer_of_run(None, Calculator())).app
    count, changes, answered = 200, 4, {1: 0.0}
    async with (
        consuming(streams, task, board=board),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://reward") as client,
    ):
        pairs = []
        for change in range(changes):
            part = count // changes
            feeding = asyncio.ensure_future(append(streams, part, first_ordinal=change * part))
            pairs += await scored(streams, part // 2)
            document = WANT_STYLE if change % 2 == 0 else task.default_preference
            response = await client.put("/v1/preferences", content=document.model_dump_json())
            answered[response.json()["version"]] = time.time()
            await feeding
            pairs += await scored(streams, part - part // 2)
    outcomes = [outcome for _, outcome in pairs if isinstance(outcome, Scored)]
    assert len(outcomes) == count
    for outcome in outcomes:
        newest = max(version for version, at in answered.items() if at < outcome.scoring_started_s)
        assert outcome.scored_under >= newest
        assert outcome.value == (1.0 if outcome.scored_under % 2 else 0.25)
    assert {outcome.scored_under for outcome in outcomes} >= {1, 2, 3, 4}
