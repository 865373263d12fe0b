"""Dead letters for whoever looks at a run from outside: find them, and say in JSON what one holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from google.protobuf.json_format import MessageToDict

from sao.streams.base import DeadLetter, TrajectoryStreams
from sao.trajectory import Trajectory

_PAGE = 256

Wanted = Callable[[DeadLetter], bool]


def with_ids(trajectory_ids: Collection[str]) -> Wanted:
    """Those of these trajectories."""
    return lambda letter: letter.trajectory_id in trajectory_ids


def with_reason(text: str) -> Wanted:
    """Those whose reason contains the text."""
    return lambda letter: text in letter.reason


async def find(streams: TrajectoryStreams, wanted: Wanted) -> list[DeadLetter]:
    """The letters that are wanted, newest first; what is buried meanwhile is not among them."""
    found: list[DeadLetter] = []
    before = None
    while page := await streams.dead_letters(count=_PAGE, before=before):
        found += filter(wanted, page)
        before = page[-1].entry_id
    return found


def age_s(letter: DeadLetter) -> float:
    """Seconds since it was buried."""
    return max(time.time() - letter.buried_ms / 1000, 0.0)


def letter_as_json(letter: DeadLetter) -> dict[str, Any]:
    """The letter in JSON's types, without its payload."""
    return {
        "trajectory_id": letter.trajectory_id,
        "stream": letter.stream.value,
        "kind": letter.kind,
        "reason": letter.reason,
        "attempt": letter.attempt,
        "buried_ms": letter.buried_ms,
        "age_s": round(age_s(letter), 1),
        "bytes": letter.size,
        "fields": dict(letter.fields),
    }


def trajectory_as_json(trajectory: Trajectory) -> dict[str, Any]:
    """The whole message in JSON's types, under the names of trajectory.proto."""
    message: dict[str, Any] = MessageToDict(trajectory.message, preserving_proto_field_name=True)
    return message
