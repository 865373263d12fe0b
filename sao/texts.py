"""A trajectory as text, for scorers and people: prompt, what the policy wrote, what the environment answered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sao.ids import uuid7
from sao.tasks.base import Prompt, Task
from sao.tokenizer import Tokenizer
from sao.trajectory import Trajectory
from sao.v1 import trajectory_pb2 as pb


@dataclass(frozen=True, slots=True)
class Turn:
    """One segment, decoded; special tokens included."""

    role: Literal["action", "observation"]
    text: str


class NoTrajectoryError(ValueError):
    """A text that the task or its tokenizer cannot make a trajectory of; the message says why."""


def prompt_text(trajectory: Trajectory, tokenizer: Tokenizer) -> str:
    """What the episode began with."""
    return tokenizer.decode(trajectory.message.prompt_token_ids)


def turns_of(trajectory: Trajectory, tokenizer: Tokenizer) -> list[Turn]:
    """Every segment in order."""
    return [
        Turn("action" if segment.kind == pb.SEGMENT_KIND_ACTION else "observation", tokenizer.decode(segment.token_ids))
        for segment in trajectory.message.segments
    ]


def written_text(trajectory: Trajectory, tokenizer: Tokenizer) -> str:
    """All that the policy wrote, one turn a line."""
    return "\n".join(turn.text for turn in turns_of(trajectory, tokenizer) if turn.role == "action")


def trajectory_of_text(
    task: Task, tokenizer: Tokenizer, text: str, *, prompt: str | None, payload: Mapping[str, object] | None
) -> Trajectory:
    """A trajectory of one turn that says `text`, for scoring only: it was never sampled.

    With `prompt`, the text of a line of the task's prompts file, the episode gives the prompt's tokens, the payload
    where none is given, and the stop token that the text lacks. Raises NoTrajectoryError.
    """
    try:
        action = tokenizer.encode(text)
        prompt_ids: list[int] = []
        if prompt is not None:
            episode = task.episode(Prompt("to-score", prompt, {}), tokenizer)
            prompt_ids, stops = episode.prompt_token_ids, episode.stop_token_ids
            action += stops[:1] if action[-1:] and action[-1] not in stops else []
            payload = episode.task_payload if payload is None else payload
    except Exception as error:  # the task and its tokenizer are the user's: what they refuse is told, whatever it is
        msg = f"task {task.name} makes no trajectory of this: {type(error).__name__}: {error}"
        raise NoTrajectoryError(msg) from error
    if not action:
        msg = "the text has no tokens; expected at least one"
        raise NoTrajectoryError(msg)
    return Trajectory(
        pb.Trajectory(
            id=uuid7(),
            task=task.name,
            prompt_token_ids=prompt_ids,
            segments=[pb.Segment(kind=pb.SEGMENT_KIND_ACTION, token_ids=action)],
            finish_reason=pb.FINISH_REASON_STOP,
            task_payload_json=json.dumps(dict(payload or {})),
        )
    )
