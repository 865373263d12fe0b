"""A trajectory in memory: the flat view that scoring and training read, made once from the wire message.

- token_ids: prompt ++ segment_1 ++ ... ++ segment_n
- action_mask: True exactly where the policy sampled the token
- logprobs: the engine's log-prob of each action token (nats), 0.0 elsewhere
- versions: the weight version that sampled each action token, "" elsewhere
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from sao.v1 import trajectory_pb2 as pb


@dataclass(frozen=True)
class Trajectory:
    """A validated `sao.v1.Trajectory` (sao.invariants says what that means) with its flat view."""

    message: pb.Trajectory

    @classmethod
    def from_bytes(cls, payload: bytes) -> Trajectory:
        """Parse what `append` stored; google.protobuf.message.DecodeError on damaged bytes."""
        return cls(pb.Trajectory.FromString(payload))

    @property
    def id(self) -> str:
        return self.message.id

    @cached_property
    def token_ids(self) -> list[int]:
        ids = list(self.message.prompt_token_ids)
        for segment in self.message.segments:
            ids.extend(segment.token_ids)
        return ids

    @cached_property
    def action_mask(self) -> list[bool]:
        mask = [False] * len(self.message.prompt_token_ids)
        for segment in self.message.segments:
            mask.extend([segment.kind == pb.SEGMENT_KIND_ACTION] * len(segment.token_ids))
        return mask

    @cached_property
    def logprobs(self) -> list[float]:
        values = [0.0] * len(self.message.prompt_token_ids)
        for segment in self.message.segments:
            action = segment.kind == pb.SEGMENT_KIND_ACTION
            values.extend(segment.logprobs if action else [0.0] * len(segment.token_ids))
        return values

    @cached_property
    def versions(self) -> list[str]:
        names = [""] * len(self.message.prompt_token_ids)
        for segment in self.message.segments:
            if segment.kind == pb.SEGMENT_KIND_ACTION:
                for span in segment.versions:
                    names.extend([span.version] * (span.end - span.start))
            else:
                names.extend([""] * len(segment.token_ids))
        return names

    @property
    def action_count(self) -> int:
        return sum(self.action_mask)

    @property
    def turns(self) -> int:
        return sum(segment.kind == pb.SEGMENT_KIND_ACTION for segment in self.message.segments)

    @cached_property
    def task_payload(self) -> Mapping[str, object]:
        payload = json.loads(self.message.task_payload_json or "{}")
        if not isinstance(payload, dict):
            msg = f"trajectory {self.id}: task_payload_json is {type(payload).__name__}, expected an object"
            raise TypeError(msg)
        return payload
