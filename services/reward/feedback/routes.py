"""POST and GET /v1/feedback: what somebody says of a trajectory minutes later, and which trajectories wait for it.

Whatever is answered 200 is durable. A repeat of the same value changes nothing and is answered 200 again, as long as
the first is remembered (`deadline_s`).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sao.preference import Finite
from sao.problems import ProblemError, answers, body_of, bounded_body, malformed, problems
from sao.streams.base import TrajectoryStreams
from sao.streams.room import Heard, Waiting
from sao.telemetry.logs import get_logger
from sao.threads import DaemonThreads
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from services.reward import metrics
from services.reward.feedback.desk import Desk

PATH = "/v1/feedback"
MAX_BODY_BYTES = 4096
_UUID7 = r"^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"

Author = Annotated[str, Query(max_length=64, description="Who says so.")]
Reason = Annotated[str, Query(max_length=500, description="Why.")]
Limit = Annotated[int, Query(ge=1, le=100, description="At most so many, those that wait longest first.")]

log = get_logger(__name__)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class FeedbackBody(_Model):
    """The body of POST /v1/feedback."""

    trajectory: Annotated[str, Field(pattern=_UUID7)]
    """Its id."""
    value: Finite
    """The component, within what the run declares."""


class FeedbackAnswer(_Model):
    """What became of it."""

    trajectory: str
    value: float
    state: Literal["joined", "kept"]
    """`kept`: it is joined when the trajectory begins to wait, if it ever does."""


class WaitingTrajectory(_Model):
    """One that somebody should say something of."""

    trajectory: str
    since_s: float
    """Unix seconds at which it began to wait."""
    until_s: float
    """Unix seconds at which it waits no longer."""
    text: str
    """Prompt, actions and observations, as the tokenizer writes them; empty where the payload is gone."""


class WaitingList(_Model):
    """The answer of GET /v1/feedback."""

    component: str
    low: float
    high: float
    waiting: int
    """All of them, also beyond the limit."""
    trajectories: list[WaitingTrajectory]


_REFUSALS = {
    Heard.UNKNOWN: (HTTPStatus.NOT_FOUND, "is unknown: of another run, or older than ingest.seen_horizon_h"),
    Heard.CONFLICT: (
        HTTPStatus.CONFLICT,
        "has another answer already, and the first one counts: do not repeat this one",
    ),
    Heard.EXPIRED: (HTTPStatus.GONE, "has expired, nobody had answered in time: requeued (`sao dead`) it waits anew"),
    Heard.CONSUMED: (HTTPStatus.GONE, "was taken by the trainer, and trained on or dropped, or it is a dead letter"),
    Heard.FULL: (HTTPStatus.SERVICE_UNAVAILABLE, "does not wait yet, and too many answers are kept already: repeat it"),
}
"""Status, and what stands behind "trajectory <id>"."""
NOT_ASKED = "is not among those that are asked for (reward.feedback.share)"


class FeedbackRoutes:
    """The two routes over one desk; they are there only in a run that asks for feedback."""

    def __init__(self, desk: Desk, streams: TrajectoryStreams, tokenizer: Tokenizer) -> None:
        self._desk = desk
        self._streams = streams
        self._tokenizer = tokenizer
        self._threads = DaemonThreads(1, name="feedback-text")

    def router(self) -> APIRouter:
        router = APIRouter()
        invalid = HTTPStatus.UNPROCESSABLE_ENTITY
        refused = problems(
            HTTPStatus.BAD_REQUEST,
            HTTPStatus.NOT_FOUND,
            HTTPStatus.CONFLICT,
            HTTPStatus.GONE,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            invalid,
        )
        router.add_api_route(
            PATH,
            self.post,
            methods=["POST"],
            openapi_extra=body_of(FeedbackBody),
            responses=answers(FeedbackAnswer) | refused,
        )
        router.add_api_route(
            PATH, self.waiting, methods=["GET"], responses=answers(WaitingList) | problems(invalid), response_model=None
        )
        return router

    async def post(self, request: Request, author: Author = "", reason: Reason = "") -> Response:
        """Say what one trajectory is worth; durable when answered 200."""
        body = await self._body(request)
        if not self._desk.asks_for(body.trajectory):
            if not await self._streams.recognised([body.trajectory]):
                raise _refusal(Heard.UNKNOWN.value, *_REFUSALS[Heard.UNKNOWN], body.trajectory)
            fate = "not_asked"
            raise _refusal(fate, HTTPStatus.GONE, NOT_ASKED, body.trajectory)
        heard = await self._desk.answer(body.trajectory, body.value, author=author, reason=reason)
        if heard in _REFUSALS:
            raise _refusal(heard.value, *_REFUSALS[heard], body.trajectory)
        state: Literal["joined", "kept"] = "joined" if heard is Heard.JOINED else "kept"
        answer = FeedbackAnswer(trajectory=body.trajectory, value=body.value, state=state)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def waiting(self, limit: Limit = 20) -> Response:
        """Which trajectories wait for feedback, with their texts."""
        settings = self._desk.settings
        found = await self._desk.waiting(count=limit)
        answer = WaitingList(
            component=settings.component,
            low=settings.low,
            high=settings.high,
            waiting=(await self._desk.use()).waiting,
            trajectories=[await self._shown(one) for one in found],  # one payload at a time in memory
        )
        return Response(answer.model_dump_json(), media_type="application/json")

    async def _shown(self, waiting: Waiting) -> WaitingTrajectory:
        payload = await self._streams.payload(waiting.trajectory_id)
        since_s = waiting.since_ms / 1000
        text = ""
        if payload is not None:
            try:
                text = await self._threads.run(lambda: self._text(payload))
            except DecodeError as error:
                log.warning("damaged payload", trajectory=waiting.trajectory_id, error=str(error))
        until_s = since_s + self._desk.settings.deadline_s
        return WaitingTrajectory(trajectory=waiting.trajectory_id, since_s=since_s, until_s=until_s, text=text)

    def _text(self, payload: bytes) -> str:
        return self._tokenizer.decode(Trajectory.from_bytes(payload).token_ids)

    async def _body(self, request: Request) -> FeedbackBody:
        data = await bounded_body(request, MAX_BODY_BYTES, "feedback")
        try:
            body = FeedbackBody.model_validate_json(data)
        except ValidationError as error:
            metrics.FEEDBACK_REFUSED.labels("malformed").inc()
            raise malformed(error) from error
        low, high = self._desk.settings.low, self._desk.settings.high
        if not low <= body.value <= high:
            metrics.FEEDBACK_REFUSED.labels("out_of_range").inc()
            msg = (
                f"/value: {body.value:g} is not within {low:g} to {high:g} (reward.feedback.low, reward.feedback.high)"
            )
            raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, msg)
        return body


def _refusal(fate: str, status: HTTPStatus, why: str, trajectory_id: str) -> ProblemError:
    metrics.FEEDBACK_REFUSED.labels(fate).inc()
    headers = {"Retry-After": "1"} if status is HTTPStatus.SERVICE_UNAVAILABLE else None
    return ProblemError(status, f"trajectory {trajectory_id} {why}", headers=headers, extra={"fate": fate})
