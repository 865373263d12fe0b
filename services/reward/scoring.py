"""GET /v1/components and POST /v1/score: what can be rewarded, and what one text or trajectory would get.

Scoring here changes nothing: no stream, no archive, no alarm; only the scorers' own metrics count the calls, and they
share their places with the trajectories of the run. So few requests are taken at a time, and the others told to wait.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from sao.archive import Archive, ArchiveError
from sao.board.base import Board
from sao.outcome import InfraFailed, Invalid, TimedOut
from sao.preference import PreferenceDocument
from sao.problems import ProblemError, bounded_body, malformed
from sao.rows import read_rows
from sao.streams.base import TrajectoryStreams
from sao.tasks.base import Task
from sao.texts import NoTrajectoryError, trajectory_of_text
from sao.threads import DaemonThreads
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from services.reward.catalogue import Catalogue, Component, document_schema
from services.reward.scorer import Evaluated, TrajectoryScorer, Unfinished

COMPONENTS_PATH = "/v1/components"
SCORE_PATH = "/v1/score"
MAX_BODY_BYTES = 8 * 2**20
AT_A_TIME = 4
"""Requests that are scored at a time; more are answered 429."""


BASE64 = r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
MATERIAL = ("text", "trajectory", "trajectory_id")
"""What can be scored; a request has exactly one of them."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class ScoreRequest(_Model):
    """The body of POST /v1/score: one of `text`, `trajectory` and `trajectory_id`."""

    text: Annotated[str, Field(min_length=1)] | None = None
    """What the policy would have written, as one turn; a text may hold special tokens."""
    prompt: str | None = None
    """With `text`: what it answers, as in a line of the task's prompts file."""
    task_payload: dict[str, JsonValue] | None = None
    """With `text`: what scoring needs beside it; by default what the task makes of `prompt`."""
    trajectory: Annotated[str, Field(min_length=1, pattern=BASE64)] | None = None
    """A whole sao.v1.Trajectory, as base64."""
    trajectory_id: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """One that is on a stream, among the dead letters, or in the archive."""
    preference: PreferenceDocument | None = None
    """What to score under; by default the current preference."""

    @model_validator(mode="after")
    def _one_of_three(self) -> ScoreRequest:
        given = [name for name in MATERIAL if name in self.model_fields_set]
        if len(given) != 1 or getattr(self, given[0]) is None:
            msg = f"found {' and '.join(given) or 'none'} of {', '.join(MATERIAL)}; give one, and not null"
            raise ValueError(msg)
        if self.text is None and self.model_fields_set & {"prompt", "task_payload"}:
            msg = "prompt and task_payload belong to a text; a trajectory has its own"
            raise ValueError(msg)
        return self


class ScoredView(BaseModel):
    """Every component was computed; `value` is their reward."""

    kind: Literal["scored"] = "scored"
    components: dict[str, float]
    judged: dict[str, str]
    """Of each component that a judge gave: the rubric's id."""
    value: float


Outcome = Annotated[ScoredView | TimedOut | InfraFailed | Invalid, Field(discriminator="kind")]


class ScoreAnswer(BaseModel):
    """What scoring came to."""

    trajectory_id: str | None
    """Null for what is no trajectory."""
    preference: str
    """Name of the document that it was scored under."""
    version: int | None
    """Of the current preference; null for a document that came with the request."""
    outcome: Outcome


class ComponentList(BaseModel):
    """Everything that a preference may read."""

    components: list[Component]


_PROBLEM: dict[str, Any] = {
    "content": {
        "application/problem+json": {
            "schema": {
                "type": "object",
                "properties": {
                    "title": {"type": "string"},
                    "status": {"type": "integer"},
                    "detail": {"type": "string"},
                },
                "required": ["title", "status", "detail"],
            }
        }
    }
}


def _problems(texts: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    return {status: {"description": text, **_PROBLEM} for status, text in texts.items()}


class ScoringRoutes:
    """The two routes."""

    def __init__(
        self,
        scorer: TrajectoryScorer,
        catalogue: Catalogue,
        task: Task,
        tokenizer: Tokenizer,
        *,
        board: Board,
        streams: TrajectoryStreams,
        run_dir: Path,
    ) -> None:
        self._scorer = scorer
        self._catalogue = catalogue
        self._task = task
        self._tokenizer = tokenizer
        self._board = board
        self._streams = streams
        self._run_dir = run_dir
        self._threads = DaemonThreads(AT_A_TIME, name="score-request")
        self._at_work = 0

    def router(self) -> APIRouter:
        router = APIRouter()
        unauthorised = {401: "No or a wrong bearer token."}
        router.add_api_route(
            COMPONENTS_PATH,
            self.components,
            methods=["GET"],
            response_model=ComponentList,
            responses=_problems(unauthorised),
        )
        router.add_api_route(
            SCORE_PATH,
            self.score,
            methods=["POST"],
            response_model=ScoreAnswer,
            responses=_problems(
                unauthorised
                | {
                    400: "The request broke off.",
                    404: "No such trajectory, or no preference is stored yet.",
                    413: "The body is too large.",
                    422: "The body is malformed, or reads components that the run does not compute.",
                    429: "Others are being scored; see Retry-After.",
                    503: "The store does not answer; see Retry-After.",
                }
            ),
            openapi_extra={
                "requestBody": {"required": True, "content": {"application/json": {"schema": _schema(self._catalogue)}}}
            },
        )
        return router

    async def components(self) -> ComponentList:
        """What the run computes: each component with its scorer, and what there is to know about both."""
        return ComponentList(components=list(self._catalogue.entries))

    async def score(self, request: Request) -> ScoreAnswer:
        """Score one text or trajectory under the current preference or a given one; nothing is changed by it."""
        if self._at_work >= AT_A_TIME:
            msg = f"{AT_A_TIME} requests are being scored already; repeat in a second"
            raise ProblemError(HTTPStatus.TOO_MANY_REQUESTS, msg, headers={"Retry-After": "1"})
        self._at_work += 1
        try:
            return await self._score(request)
        finally:
            self._at_work -= 1

    async def _score(self, request: Request) -> ScoreAnswer:
        asked = await _parsed(request)
        document, version = await self._document(asked.preference)
        trajectory = await self._trajectory(asked)
        outcome: Outcome = trajectory if isinstance(trajectory, Invalid) else await self._outcome(trajectory, document)
        trajectory_id = asked.trajectory_id if isinstance(trajectory, Invalid) else trajectory.id
        return ScoreAnswer(trajectory_id=trajectory_id, preference=document.name, version=version, outcome=outcome)

    async def _outcome(self, trajectory: Trajectory, document: PreferenceDocument) -> Outcome:
        found = await self._scorer.evaluate(trajectory, document)
        if isinstance(found, Evaluated):
            return ScoredView(components=found.components, judged=found.judged, value=found.value)
        if isinstance(found, Unfinished):
            reason = "the preference reads it, and it comes later, through POST /v1/feedback"
            return InfraFailed(component=found.waits_for, reason=reason)
        return found

    async def _document(self, given: PreferenceDocument | None) -> tuple[PreferenceDocument, int | None]:
        if given is None:
            current = await self._board.preference()
            if current is None:
                raise ProblemError(HTTPStatus.NOT_FOUND, "no preference is stored yet; PUT one, or send one along")
            return current.document, current.version
        if unknown := sorted(given.components - self._catalogue.components):
            known = sorted(self._catalogue.components)
            msg = f"preference: the run does not compute {', '.join(unknown)}; it computes {', '.join(known)}"
            extra: dict[str, object] = {"unknown_components": unknown, "components": known}
            raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, msg, extra=extra)
        return given, None

    async def _trajectory(self, asked: ScoreRequest) -> Trajectory | Invalid:
        if asked.text is not None:
            text, prompt, payload = asked.text, asked.prompt, asked.task_payload
            try:
                return await self._threads.run(
                    lambda: trajectory_of_text(self._task, self._tokenizer, text, prompt=prompt, payload=payload)
                )
            except NoTrajectoryError as error:
                return Invalid(reason=str(error))
        if asked.trajectory is not None:
            encoded = asked.trajectory
            return await self._threads.run(lambda: _decoded(base64.b64decode(encoded)))
        return await self._known(str(asked.trajectory_id))

    async def _known(self, trajectory_id: str) -> Trajectory | Invalid:
        """From the streams, where its payload lies until it is trained on; then from the archive."""
        payload = await self._streams.payload(trajectory_id)
        if payload is not None:
            return await self._threads.run(lambda: _decoded(payload))
        found = await self._threads.run(lambda: archived(self._run_dir, trajectory_id))
        if found is None:
            msg = f"trajectory {trajectory_id!r} is on no stream, and no archived update holds it"
            raise ProblemError(HTTPStatus.NOT_FOUND, msg)
        return found


def archived(run_dir: Path, trajectory_id: str) -> Trajectory | None:
    """The trajectory of this id that the run was trained on; None when the archive does not hold it (any more)."""
    if not (run_dir / "archive").is_dir():
        return None
    rows = read_rows(run_dir / "updates.jsonl")
    updates = [row.update for row, _ in rows if any(one.id == trajectory_id for one in row.trajectories)]
    archive = Archive(run_dir / "archive")
    for update in reversed(updates):
        try:
            steps = archive.read_history(update)
        except ArchiveError:  # pruned, or damaged: then it is as good as gone
            continue
        for trained in (one for step in steps for one in step.trajectories):
            if trained.trajectory.id == trajectory_id:
                return Trajectory(trained.trajectory)
    return None


async def _parsed(request: Request) -> ScoreRequest:
    body = await bounded_body(request, MAX_BODY_BYTES, "a request to score")
    try:
        return ScoreRequest.model_validate_json(body)
    except ValidationError as error:
        raise malformed(error) from error


def _decoded(payload: bytes) -> Trajectory | Invalid:
    try:
        trajectory = Trajectory.from_bytes(payload)
    except DecodeError as error:
        return Invalid(reason=f"not a sao.v1.Trajectory: {error}")
    return trajectory if any(trajectory.action_mask) else Invalid(reason="the trajectory has no action token")


def _schema(catalogue: Catalogue) -> dict[str, Any]:
    """Of the body: one shape for each thing that can be scored."""
    properties = ScoreRequest.model_json_schema()["properties"]
    preference = {"anyOf": [document_schema(catalogue), {"type": "null"}]}
    shapes = []
    for name in MATERIAL:
        of_text = {key: properties[key] for key in ("prompt", "task_payload") if name == "text"}
        if of_text:
            of_text["task_payload"] = {"anyOf": [{"type": "object"}, {"type": "null"}]}
        here = {**properties[name]["anyOf"][0], "description": properties[name]["description"]}
        shapes.append(
            {
                "title": name,
                "type": "object",
                "properties": {name: here, **of_text, "preference": preference},
                "required": [name],
                "additionalProperties": False,
            }
        )
    return {"title": "ScoreRequest", "oneOf": shapes}
