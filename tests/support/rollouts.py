"""Trajectories as a worker would have recorded them, from texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from sao.ids import uuid7
from sao.tasks.base import Prompt, Task
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from sao.v1 import trajectory_pb2 as pb


def recorded(
    prompt: Sequence[int],
    turns: Sequence[tuple[Sequence[int], Sequence[int]]],
    payload: Mapping[str, object],
    *,
    task: str = "",
    finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP,
) -> Trajectory:
    """A trajectory of (action, observation) turns; an empty observation makes no segment."""
    segments = []
    for action, observation in turns:
        span = pb.VersionSpan(version="v0", start=0, end=len(action))
        logprobs = [-1.0] * len(action)
        kind = pb.SEGMENT_KIND_ACTION
        segments.append(pb.Segment(kind=kind, token_ids=action, logprobs=logprobs, versions=[span]))
        if observation:
            segments.append(pb.Segment(kind=pb.SEGMENT_KIND_OBSERVATION, token_ids=observation))
    message = pb.Trajectory(
        id=uuid7(),
        task=task,
        prompt_token_ids=prompt,
        segments=segments,
        finish_reason=finish_reason,
        task_payload_json=json.dumps(dict(payload)),
    )
    return Trajectory(message)


def play(task: Task, prompt: Prompt, tokenizer: Tokenizer, actions: Sequence[str]) -> Trajectory:
    """The trajectory of a policy that says `actions`, one a turn, until the episode ends it."""
    episode = task.episode(prompt, tokenizer)
    turns: list[tuple[Sequence[int], Sequence[int]]] = []
    for text in actions:
        action = tokenizer.encode(text)
        observation = episode.observe(action)
        turns.append((action, observation.token_ids))
        if observation.done:
            break
    return recorded(episode.prompt_token_ids, turns, episode.task_payload, task=task.name)
