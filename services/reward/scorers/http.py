"""A scorer behind a URL: the trajectory as text goes there, its components come back.

    request   {"trajectory_id": "...", "task": "writing", "finish_reason": "stop", "prompt": "<bos> moon <go>",
               "turns": [{"role": "action", "text": "..."}, {"role": "observation", "text": "..."}],
               "task_payload": {...}, "components": ["humour"]}
    answer    {"components": {"humour": 0.25}}

The answer has exactly the declared components, each a finite number; 422 says that this trajectory can never be scored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sao.config.schema import HttpScorerSection
from sao.texts import prompt_text, turns_of
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from sao.v1 import trajectory_pb2 as pb
from services.reward.scorers.base import ScorerFailedError, ScoringRequest, checked
from services.reward.scorers.remote import RemoteCalls, RemoteSettings


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    components: dict[str, Annotated[float, Field(allow_inf_nan=False)]]


class HttpScorer:
    """One URL that scores."""

    kind: str = "http"
    judges: bool = False
    bounds: tuple[float, float] | None = None

    def __init__(
        self,
        name: str,
        section: HttpScorerSection,
        *,
        environment: Mapping[str, str] = os.environ,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.name = name
        self.components: Mapping[str, str] = section.components
        self.deadline_s = section.deadline_s
        self.concurrency = section.concurrency
        settings = RemoteSettings(
            name,
            section.url,
            section.token_env,
            section.deadline_s,
            section.concurrency,
            section.retries,
            section.backoff_s,
        )
        self._calls = RemoteCalls(settings, environment=environment, transport=transport)

    async def score(self, request: ScoringRequest) -> Mapping[str, float]:
        found = await self._calls.post(lambda: self._body(request), trajectory_id=request.trajectory.id)
        try:
            answer = _Answer.model_validate(found)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            msg = f'the answer is not {{"components": {{name: number}}}}: {where}: {first["msg"]}'
            raise ScorerFailedError(msg) from error
        return checked(answer.components, self.components)

    async def close(self) -> None:
        await self._calls.close()

    def _body(self, request: ScoringRequest) -> dict[str, object]:
        return {**as_text(request.trajectory, request.tokenizer), "components": sorted(self.components)}


def as_text(trajectory: Trajectory, tokenizer: Tokenizer) -> dict[str, object]:
    """The trajectory in JSON's types, its tokens as text."""
    reason = pb.FinishReason.Name(trajectory.message.finish_reason)
    return {
        "trajectory_id": trajectory.id,
        "task": trajectory.message.task,
        "finish_reason": reason.removeprefix("FINISH_REASON_").lower(),
        "prompt": prompt_text(trajectory, tokenizer),
        "turns": [{"role": turn.role, "text": turn.text} for turn in turns_of(trajectory, tokenizer)],
        "task_payload": dict(trajectory.task_payload),
    }
