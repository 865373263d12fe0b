"""Notices when a prompt draws the completion it drew last time: shared seeds look like that, and so does collapse."""

from __future__ import annotations

from collections import OrderedDict

from sao.v1 import trajectory_pb2 as pb
from services.rollout import metrics


class Repeats:
    """The last completion of each of the `capacity` most recent prompts."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._last: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def see(self, trajectory: pb.Trajectory) -> bool:
        """Count it when it equals the one before; whether it did."""
        completion = tuple(
            token
            for segment in trajectory.segments
            if segment.kind == pb.SEGMENT_KIND_ACTION
            for token in segment.token_ids
        )
        repeated = self._last.get(trajectory.prompt_id) == completion
        self._last[trajectory.prompt_id] = completion
        self._last.move_to_end(trajectory.prompt_id)
        if len(self._last) > self._capacity:
            self._last.popitem(last=False)
        if repeated:
            metrics.REPEATED.inc()
        return repeated
