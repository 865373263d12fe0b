"""Every kind of scorer, doing what a test tells it to."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.judge.server import Asked, Breakage, LoopbackServer, Reply, completion
from sao.config.schema import HttpScorerSection, JudgeScorerSection, PythonScorerSection
from sao.preference import PreferenceDocument
from sao.tasks.base import Prompt, UnscorableError
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from sao.tasks.writing import Writing
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from services.reward.scorers.base import ComponentScorer, ScoringRequest
from services.reward.scorers.http import HttpScorer
from services.reward.scorers.judge import JudgeScorer
from services.reward.scorers.memory import MemoryScorer
from services.reward.scorers.python import PythonScorer
from tests.support.rollouts import play
from tests.support.waiting import eventually

TASK = Writing()
TOKENIZER = tokenizer_of_run(None, TASK)
COMPONENTS = {"humour": "How funny it is", "taste": "Whether it is in good taste"}
GOOD = {"humour": 0.25, "taste": 1.0}
DOCUMENT = PreferenceDocument(name="funny", weights={"humour": 1.0, "taste": 0.5}, rubric="Puns are not funny.")


@dataclass
class Behaviour:
    """What the scorer does with each call."""

    says: Mapping[str, object] = field(default_factory=lambda: dict(GOOD))
    raises: Exception | None = None
    hangs: bool = False
    release: threading.Event = field(default_factory=threading.Event)
    running: int = 0
    most: int = 0


_BEHAVIOUR = Behaviour()


def steered(trajectory: Trajectory, tokenizer: Tokenizer) -> Mapping[str, Any]:
    """The target of the python scorer."""
    behaviour = _BEHAVIOUR
    behaviour.running += 1
    behaviour.most = max(behaviour.most, behaviour.running)
    try:
        if behaviour.hangs:
            behaviour.release.wait(20)
        if behaviour.raises is not None:
            raise behaviour.raises
        return behaviour.says
    finally:
        behaviour.running -= 1


async def _steered_soon(_: ScoringRequest) -> Mapping[str, Any]:
    behaviour = _BEHAVIOUR
    behaviour.running += 1
    behaviour.most = max(behaviour.most, behaviour.running)
    try:
        if behaviour.hangs:
            await eventually(behaviour.release.is_set, what="the test to release the call", timeout_s=20)
        if behaviour.raises is not None:
            raise behaviour.raises
        return behaviour.says
    finally:
        behaviour.running -= 1


async def _handled(asked: Asked) -> Reply | Breakage:
    behaviour = _BEHAVIOUR
    behaviour.running += 1
    behaviour.most = max(behaviour.most, behaviour.running)
    try:
        if behaviour.hangs:
            await eventually(behaviour.release.is_set, what="the test to release the call", timeout_s=20)
    finally:
        behaviour.running -= 1
    if isinstance(behaviour.raises, UnscorableError):
        return Reply(422, str(behaviour.raises).encode())
    if behaviour.raises is not None:
        return Reply(400, str(behaviour.raises).encode())
    judge = asked.path.endswith("/chat/completions")
    return Reply(body=json.dumps(completion(behaviour.says) if judge else {"components": behaviour.says}).encode())


Build = Callable[..., ComponentScorer]


@contextlib.asynccontextmanager
async def scorers_of(kind: str, behaviour: Behaviour) -> AsyncIterator[Build]:
    """Makes scorers of this kind that behave so: `build(deadline_s=..., concurrency=...)`."""
    global _BEHAVIOUR  # noqa: PLW0603  # the target is found by its name alone
    _BEHAVIOUR = behaviour
    made: list[ComponentScorer] = []
    async with LoopbackServer(_handled) as server:

        def build(*, deadline_s: float = 5.0, concurrency: int = 4) -> ComponentScorer:
            common: dict[str, Any] = {"components": COMPONENTS, "deadline_s": deadline_s, "concurrency": concurrency}
            made.append(_built(kind, server.url, common))
            return made[-1]

        try:
            yield build
        finally:
            behaviour.release.set()
            for scorer in made:
                await scorer.close()


def _built(kind: str, url: str, common: dict[str, Any]) -> ComponentScorer:
    match kind:
        case "python":
            target = "tests.support.scorers:steered"
            return PythonScorer("critic", PythonScorerSection(kind="python", target=target, **common))
        case "http":
            return HttpScorer("critic", HttpScorerSection(kind="http", url=f"{url}/score", **common))
        case "judge":
            return JudgeScorer("critic", judge_section(url, **common))
        case _:
            return MemoryScorer("critic", answer=_steered_soon, **common)


def judge_section(url: str, **settings: Any) -> JudgeScorerSection:
    """A judge of COMPONENTS at this server."""
    return JudgeScorerSection.model_validate(
        {"kind": "judge", "url": f"{url}/v1", "model": "tiny", "components": COMPONENTS, **settings}
    )


def request(text: str = "nyan sparkle <eos>", document: PreferenceDocument = DOCUMENT) -> ScoringRequest:
    """A text of the writing task, to be scored."""
    return ScoringRequest(play(TASK, Prompt("p", "moon", {}), TOKENIZER, [text]), TOKENIZER, document)
