"""Feedback on a real Valkey: the example for products as printed, and minutes of a run on a clock of its own."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

import sao.streams
from sao.board.base import Board
from sao.config import RunConfig, dump_run_config
from sao.config.schema import FeedbackSection
from sao.ids import uuid7
from sao.outcome import Scored
from sao.streams.base import StreamName
from sao.tasks.base import Prompt
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from sao.tasks.writing import LEXICONS, Writing
from services.reward.feedback.asking import asked
from tests.support.processes import free_port
from tests.support.reception import LIKED, Reception, post
from tests.support.rollouts import play
from tests.support.scored_tasks import scored, trajectory
from tests.support.services import service
from tests.support.stores import Stores, open_stores
from tests.support.waiting import eventually

PAGE = Path(__file__).resolve().parents[2] / "docs" / "feedback.md"
LATE_S, ANSWERS, LIMIT = 180.0, 50, 20


async def test_the_example_for_products_works_as_printed(run_config: RunConfig, tmp_path: Path) -> None:
    task = Writing()
    document = task.default_preference.model_copy(update={"weights": {"feedback": 1.0}})
    reward = run_config.reward.model_copy(update={"port": free_port(), "feedback": FeedbackSection()})
    writing = run_config.task.model_copy(update={"name": "writing"})
    config = run_config.model_copy(update={"reward": reward, "task": writing, "preference": document})
    (tmp_path / "run.toml").write_text(dump_run_config(config))
    streams, url = sao.streams.connect(config), f"http://127.0.0.1:{reward.port}"
    await streams.open_consumer(StreamName.SCORED, "trainer")
    for ordinal, style in enumerate(("cute", "classical")):
        text = " ".join([*LEXICONS[style][:10], "<eos>"])
        made = play(task, Prompt("p", "moon", {}), tokenizer_of_run(None, task), [text])
        payload = made.message.SerializeToString()
        await streams.append(made.id, payload, ordinal=ordinal, sample=0, fields={"task": "writing"})
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    example = example.replace("http://localhost:8080", url)

    def ask(text: str) -> int | None:
        return 2 if LEXICONS["cute"][0] in text else None

    with service("services.reward", reward.port, config, tmp_path / "run.toml", tmp_path / "reward.log"):
        waits = httpx.AsyncClient(base_url=url)
        await eventually(lambda: _waiting(waits, 2), what="two trajectories that wait", timeout_s=30)
        exec(compile(example, str(PAGE), "exec"), {"ask_a_user": ask})
        ((_, outcome),) = await scored(streams, 1)
        await eventually(lambda: _waiting(waits, 1), what="one that waits")
        await waits.aclose()
    assert isinstance(outcome, Scored)
    assert (outcome.components["feedback"], outcome.value) == (0.25, 0.75 * outcome.components["quality"])
    await streams.close()


async def _waiting(client: httpx.AsyncClient, count: int) -> bool:
    found: int = (await client.get("/v1/feedback")).raise_for_status().json()["waiting"]
    return found == count


@pytest.fixture
async def stores(valkey_url: str) -> AsyncIterator[Stores]:
    """A fresh run on a real Valkey."""
    async with open_stores(valkey_url) as opened:
        yield opened


async def test_answers_three_minutes_late_train_or_expire_and_admission_never_stalls(
    stores: Stores, tmp_path: Path
) -> None:
    board: Board = stores.board
    await board.put_preference(LIKED)
    epoch = await board.new_trainer_epoch()
    settings = FeedbackSection(share=0.5, unasked=0.5, deadline_s=200.0)
    replicas = [Reception(stores.streams, board, settings, tmp_path, consumer=f"reward-{n}") for n in range(2)]
    await stores.streams.open_consumer(StreamName.SCORED, "trainer")
    rolled_out: dict[str, float] = {}
    answered: set[str] = set()
    trained: set[str] = set()
    now_s = replicas[0].now_s

    def due() -> list[str]:
        """The first fifty that were asked for, three minutes after."""
        first = [one for one in rolled_out if asked(one, settings.share)][:ANSWERS]
        return [one for one in first if one not in answered and now_s - rolled_out[one] >= LATE_S]

    while len(answered) < ANSWERS or not await replicas[0].buried():
        leases = await stores.ledger.lease("w", 8, limit=LIMIT, now_ms=1, ttl_ms=10**9, deadline_ms=10**9)
        assert leases, f"nothing was leased after {now_s - replicas[0].now_s:.0f} s: admission stalls"
        for lease in leases:
            made = trajectory().message
            made.id = uuid7()
            rolled_out[made.id] = now_s
            await stores.streams.append(
                made.id, made.SerializeToString(), ordinal=lease.ordinal, sample=0, fields={"task": "steered"}
            )
        now_s += 10
        for replica in replicas:
            replica.now_s = now_s
        async with replicas[0].consuming(), replicas[1].consuming():
            await eventually(replicas[0].nothing_left, what="an empty trajectories stream")
        for number, one in enumerate(due()):
            async with replicas[number % 2].client() as client:
                answer = await post(client, one, 1.0)
                assert answer.json().get("state") == "joined", answer.text
            answered.add(one)
        await replicas[1].desk.sweep()
        while batch := await stores.streams.read(StreamName.SCORED, "trainer", count=100, block_ms=0):
            assert await stores.streams.settle(batch, "trainer", epoch=epoch) == len(batch)
            trained |= {delivery.trajectory_id for delivery in batch}

    waiting, dead = set(await replicas[0].waiting()), await replicas[0].buried()
    assert answered <= trained
    assert trained | waiting | dead.keys() == rolled_out.keys()
    assert len(trained) + len(waiting) + len(dead) == len(rolled_out)
    assert dead
    assert all(reason.startswith("timeout: feedback") for reason in dead.values())
    assert len(waiting) + len(dead) > LIMIT, "more have waited than admission would allow"
