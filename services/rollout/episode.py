"""One rollout: act, observe, act, ... until the environment is done or a limit is reached. Token ids throughout.

    ids = prompt;  repeat:  action <- engine(ids);  ids += action;  observation <- environment(action);  ids += it

Every turn's prompt is the ids before it by construction: nothing is decoded and encoded again.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from sao.ids import uuid7
from sao.routing import RoutingShape
from sao.tasks.base import Episode, Observation, Prompt, Task
from sao.telemetry.logs import get_logger
from sao.telemetry.traces import OFF, Span, Tracer, child, context_of
from sao.threads import DaemonThreads
from sao.tokenizer import Tokenizer
from sao.v1 import ingest_pb2
from sao.v1 import trajectory_pb2 as pb
from services.rollout import metrics
from services.rollout.engines.base import SAMPLING, EngineError, Finish, Turn
from services.rollout.rotation import Rotation
from services.rollout.routing import completed, extended

log = get_logger(__name__)

_ENVIRONMENT_THREADS = 32
"""Environments that react at the same time, hanging ones among them."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    max_turns: int
    max_new_tokens: int
    """Per turn."""
    max_tokens: int
    """Prompt, actions and observations together."""
    turn_timeout_s: float
    """For each of: getting an engine, the turn, the wait for its version's check, the environment's answer."""


class UnplayableError(Exception):
    """The task gives no episode for this prompt, or one with no room for an action: no attempt can succeed."""


@dataclass
class _Draft:
    """What has happened so far."""

    ids: list[int]
    segments: list[pb.Segment] = field(default_factory=list)
    timings: list[pb.TurnTiming] = field(default_factory=list)
    engine_id: str = ""
    row_bytes: int = 0
    """Of one token's routes; 0: they are not recorded."""
    routes: bytes = b""

    @property
    def routed(self) -> int:
        """Tokens whose routes are on record."""
        return len(self.routes) // self.row_bytes if self.row_bytes else 0

    def act(self, turn: Turn, engine_id: str, started_s: float) -> None:
        if self.row_bytes:
            self.routes = extended(self.routes, turn.routed_experts, len(self.ids), turn.spans, self.row_bytes)
        spans = [pb.VersionSpan(version=span.version, start=span.start, end=span.end) for span in turn.spans]
        self.segments.append(
            pb.Segment(kind=pb.SEGMENT_KIND_ACTION, token_ids=turn.token_ids, logprobs=turn.logprobs, versions=spans)
        )
        self.timings.append(pb.TurnTiming(started_s=started_s, engine_s=turn.engine_s))
        self.ids.extend(turn.token_ids)
        self.engine_id = engine_id

    def observe(self, token_ids: Sequence[int]) -> None:
        self.segments.append(pb.Segment(kind=pb.SEGMENT_KIND_OBSERVATION, token_ids=token_ids))
        self.ids.extend(token_ids)


class EpisodeRunner:
    """Plays episodes of one task; any number at a time."""

    def __init__(
        self,
        *,
        run: str,
        worker_id: str,
        task: Task,
        tokenizer: Tokenizer,
        prompt_of: Callable[[int], Prompt],
        rotation: Rotation,
        limits: EpisodeLimits,
        routing: RoutingShape | None = None,
        salted: bool = False,
        tracer: Tracer = OFF,
    ) -> None:
        """`routing`: of the record that the engines send with each turn; None: they send none.

        `salted`: each version has its own part of the engines' prefix caches, which their loads do not empty.
        """
        self._run = run
        self._worker_id = worker_id
        self._task = task
        self._tokenizer = tokenizer
        self._prompt_of = prompt_of
        self._rotation = rotation
        self._limits = limits
        self._row_bytes = routing.row_bytes if routing is not None else 0
        self._salted = salted
        self._tracer = tracer
        self._threads = DaemonThreads(_ENVIRONMENT_THREADS, name="environment")

    async def play(self, lease: ingest_pb2.PromptLease, attempt: int) -> ingest_pb2.PublishRequest:
        """A finished trajectory for this lease, with its routed experts where they are replayed.

        Raises EngineError when a turn failed (the attempt is worth nothing), UnplayableError.
        """
        trajectory_id = uuid7()
        with self._tracer.span("episode", context_of(trajectory_id)) as span:
            span.set(task=self._task.name, ordinal=lease.ordinal, sample=lease.sample, attempt=attempt)
            request = await self._played(lease, attempt, trajectory_id, span.traceparent)
            _note_episode(span, request.trajectory)
        return request

    async def _played(
        self, lease: ingest_pb2.PromptLease, attempt: int, trajectory_id: str, traceparent: str
    ) -> ingest_pb2.PublishRequest:
        started = time.monotonic()
        prompt = self._prompt_of(lease.ordinal)
        environment, prompt_ids = self._begin(prompt)
        draft = _Draft(list(prompt_ids), row_bytes=self._row_bytes)
        finish = await self._turns(draft, environment, trajectory_id)
        metrics.EPISODE_SECONDS.observe(time.monotonic() - started)
        metrics.EPISODES.labels(_name_of(finish)).inc()
        _count_tokens(prompt_ids, draft.segments)
        trajectory = pb.Trajectory(
            id=trajectory_id,
            run=self._run,
            task=self._task.name,
            prompt_id=prompt.id,
            ordinal=lease.ordinal,
            sample=lease.sample,
            attempt=attempt,
            prompt_token_ids=prompt_ids,
            segments=draft.segments,
            sampling=SAMPLING,
            finish_reason=finish,
            engine_id=draft.engine_id,
            worker_id=self._worker_id,
            turns=draft.timings,
            task_payload_json=json.dumps(dict(environment.task_payload), separators=(",", ":")),
            lease_id=lease.lease_id,
            traceparent=traceparent,
        )
        routes = completed(draft.routes, len(draft.ids), self._row_bytes)
        return ingest_pb2.PublishRequest(trajectory=trajectory, routed_experts=routes)

    def _begin(self, prompt: Prompt) -> tuple[Episode, list[int]]:
        try:
            environment = self._task.episode(prompt, self._tokenizer)
            prompt_ids = list(environment.prompt_token_ids)
        except Exception as error:
            msg = f"prompt {prompt.id}: task {self._task.name} gives no episode: {type(error).__name__}: {error}"
            raise UnplayableError(msg) from error
        if not 1 <= len(prompt_ids) < self._limits.max_tokens:
            msg = f"prompt {prompt.id}: {len(prompt_ids)} tokens, expected 1 to rollout.max_tokens - 1 "
            raise UnplayableError(msg + f"({self._limits.max_tokens - 1})")
        return environment, prompt_ids

    async def _turns(self, draft: _Draft, environment: Episode, trajectory_id: str) -> pb.FinishReason.ValueType:
        for number in range(1, self._limits.max_turns + 1):
            room = self._limits.max_tokens - len(draft.ids)
            turn = await self._act(draft, environment.stop_token_ids, min(room, self._limits.max_new_tokens))
            if turn.finish is Finish.LENGTH:
                return pb.FINISH_REASON_LENGTH
            started = time.monotonic()
            observation = await self._observe(environment, turn, trajectory_id)
            draft.timings[-1].environment_s = time.monotonic() - started
            metrics.ENVIRONMENT_SECONDS.observe(draft.timings[-1].environment_s)
            if observation is None:
                return pb.FINISH_REASON_ENV_ERROR
            # Another turn needs room for the whole observation and at least one token after it.
            fits = len(draft.ids) + len(observation.token_ids) + (not observation.done) <= self._limits.max_tokens
            if observation.token_ids and fits:
                draft.observe(observation.token_ids)
            if observation.done:
                return pb.FINISH_REASON_STOP
            if not fits:
                return pb.FINISH_REASON_LENGTH
            if not observation.token_ids:
                log.error("environment gave no tokens to react to and is not done", trajectory=trajectory_id)
                return pb.FINISH_REASON_ENV_ERROR
            if number == self._limits.max_turns:
                return pb.FINISH_REASON_TURN_LIMIT
        msg = f"max_turns {self._limits.max_turns}, expected at least 1"
        raise ValueError(msg)

    async def _act(self, draft: _Draft, stop_token_ids: Sequence[int], max_new_tokens: int) -> Turn:
        with child("generate") as span:
            span.set(turn=len(draft.timings) + 1, prompt_tokens=len(draft.ids))
            try:
                turn = await self._generate(draft, stop_token_ids, max_new_tokens)
            except EngineError as error:
                span.fail(error.kind)
                raise
            span.set(engine=draft.engine_id, tokens=len(turn.token_ids), version=turn.spans[-1].version)
        return turn

    async def _generate(self, draft: _Draft, stop_token_ids: Sequence[int], max_new_tokens: int) -> Turn:
        limit = self._limits.turn_timeout_s
        started_s = time.time()
        async with self._rotation.turn(timeout_s=limit, prefer=draft.engine_id or None) as engine:
            doubted = self._rotation.doubted(engine.engine_id)
            try:
                turn = await engine.generate(
                    draft.ids,
                    max_new_tokens=max_new_tokens,
                    stop_token_ids=stop_token_ids,
                    rid=uuid.uuid4().hex,
                    timeout_s=limit,
                    routes_from=draft.routed,
                    cache_salt=self._rotation.served(engine.engine_id) if self._salted else "",
                )
            except EngineError as error:
                metrics.ENGINE_ERRORS.labels(engine.engine_id, error.kind).inc()
                raise
        await self._rotation.verified(engine.engine_id, turn.versions, timeout_s=limit, doubted=doubted)
        metrics.TURN_SECONDS.labels(engine.engine_id).observe(turn.engine_s)
        draft.act(turn, engine.engine_id, started_s)
        return turn

    async def _observe(self, environment: Episode, turn: Turn, trajectory_id: str) -> Observation | None:
        """The environment's answer; None when it broke or passed its deadline."""
        try:
            with child("environment"):
                async with asyncio.timeout(self._limits.turn_timeout_s):
                    return await self._threads.run(partial(environment.observe, turn.token_ids))
        except Exception:
            log.exception("environment failed", trajectory=trajectory_id, task=self._task.name)
            return None


def _name_of(finish: pb.FinishReason.ValueType) -> str:
    return pb.FinishReason.Name(finish).removeprefix("FINISH_REASON_").lower()


def _note_episode(span: Span, trajectory: pb.Trajectory) -> None:
    actions = [segment for segment in trajectory.segments if segment.kind == pb.SEGMENT_KIND_ACTION]
    span.set(
        worker=trajectory.worker_id,
        engine=trajectory.engine_id,
        turns=len(actions),
        tokens=len(trajectory.prompt_token_ids) + sum(len(segment.token_ids) for segment in trajectory.segments),
        action_tokens=sum(len(segment.token_ids) for segment in actions),
        finish=_name_of(trajectory.finish_reason),
        version_first=actions[0].versions[0].version,
        version_last=actions[-1].versions[-1].version,
    )


def _count_tokens(prompt_ids: Sequence[int], segments: Sequence[pb.Segment]) -> None:
    metrics.TOKENS.labels("prompt").inc(len(prompt_ids))
    for segment in segments:
        kind = "action" if segment.kind == pb.SEGMENT_KIND_ACTION else "observation"
        metrics.TOKENS.labels(kind).inc(len(segment.token_ids))
