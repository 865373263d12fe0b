"""The waiting room inside one process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from sao.streams.base import Delivery, StreamName
from sao.streams.room import Feedback, Heard, RoomUse, Waiting


@dataclass(frozen=True)
class Around:
    """What the room needs of the streams that it belongs to."""

    take: Callable[[Delivery, str], bool]
    """Off its stream, if this consumer still owns it."""
    release: Callable[[str], None]
    """Out of admission."""
    admitted: Callable[[str], bool]
    seen: Callable[[str], bool]
    hand_on: Callable[[StreamName, str, Mapping[str, str]], Awaitable[None]]
    bury: Callable[[str, Mapping[str, str], str], Awaitable[None]]


class MemoryRoom:
    """sao.streams.room.WaitingRoom on plain dictionaries."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._waiting: dict[str, Waiting] = {}
        self._answers: dict[str, Feedback] = {}
        self._joined: dict[str, int] = {}
        self._expired: dict[str, int] = {}

    async def park(self, delivery: Delivery, consumer: str, fields: Mapping[str, str], *, now_ms: int) -> bool:
        if not self._around.take(delivery, consumer):
            return False
        trajectory_id = delivery.trajectory_id
        self._waiting[trajectory_id] = Waiting(trajectory_id, dict(fields), now_ms)
        self._expired.pop(trajectory_id, None)
        self._joined.pop(trajectory_id, None)
        self._around.release(trajectory_id)
        return True

    async def answer(self, trajectory_id: str, feedback: Feedback, *, kept_max: int) -> Heard:
        heard = self._heard(trajectory_id, feedback, kept_max)
        if heard in {Heard.WAITING, Heard.KEPT}:
            self._answers.setdefault(trajectory_id, feedback)
        return heard

    def _heard(self, trajectory_id: str, feedback: Feedback, kept_max: int) -> Heard:
        seen, waits = self._around.seen(trajectory_id), trajectory_id in self._waiting
        found = Heard.WAITING if waits else Heard.KEPT
        if (known := self._answers.get(trajectory_id)) is not None:
            if known.value != feedback.value:
                found = Heard.CONFLICT
            elif not waits and trajectory_id in self._joined:
                found = Heard.JOINED
        elif not waits and not self._around.admitted(trajectory_id):
            gone = Heard.CONSUMED if seen else Heard.UNKNOWN
            found = Heard.EXPIRED if trajectory_id in self._expired else gone
        elif not waits and len(self._kept()) >= kept_max:
            found = Heard.FULL
        return found

    def _kept(self) -> list[str]:
        return [one for one in self._answers if one not in self._joined and one not in self._waiting]

    async def answered(self, *, count: int) -> list[tuple[Waiting, Feedback]]:
        pairs = [(one, self._answers[one.trajectory_id]) for one in self._waiting.values() if self._ready(one)]
        return pairs[:count]

    async def find(self, trajectory_id: str) -> tuple[Waiting, Feedback] | None:
        pairs = await self.answered(count=len(self._waiting))
        return next((pair for pair in pairs if pair[0].trajectory_id == trajectory_id), None)

    async def waiting(self, *, count: int) -> list[Waiting]:
        return sorted(self._waiting.values(), key=lambda one: (one.since_ms, one.trajectory_id))[:count]

    def _ready(self, waiting: Waiting) -> bool:
        return waiting.trajectory_id in self._answers

    def _take(self, waiting: Waiting, *, answered: bool) -> bool:
        """Remove it if this very parking is there, answered or not as it must be."""
        there = self._waiting.get(waiting.trajectory_id)
        if there is None or there.since_ms != waiting.since_ms or self._ready(waiting) is not answered:
            return False
        del self._waiting[waiting.trajectory_id]
        return True

    async def join(
        self,
        waiting: Waiting,
        fields: Mapping[str, str],
        *,
        now_ms: int,
        answered: bool = True,
        to: StreamName = StreamName.SCORED,
    ) -> bool:
        if not self._take(waiting, answered=answered):
            return False
        if answered:
            self._joined[waiting.trajectory_id] = now_ms
        await self._around.hand_on(to, waiting.trajectory_id, fields)
        return True

    async def bury(self, waiting: Waiting, reason: str, *, now_ms: int, answered: bool = False) -> bool:
        if not self._take(waiting, answered=answered):
            return False
        (self._joined if answered else self._expired)[waiting.trajectory_id] = now_ms
        await self._around.bury(waiting.trajectory_id, waiting.fields, reason)
        return True

    async def forget(self, *, kept_before_ms: int, joined_before_ms: int, remembered: int) -> int:
        unused = [one for one in self._kept() if self._answers[one].at_ms < kept_before_ms]
        for trajectory_id in unused:
            del self._answers[trajectory_id]
        for memory in (self._joined, self._expired):
            ordered = sorted(memory, key=lambda one: (memory[one], one))
            beyond = set(ordered[: max(len(ordered) - remembered, 0)])
            for trajectory_id in [one for one in ordered if memory[one] < joined_before_ms or one in beyond]:
                del memory[trajectory_id]
                if memory is self._joined:
                    self._answers.pop(trajectory_id, None)
        return len(unused)

    def erase(self, trajectory_id: str) -> tuple[int, int]:
        """Nothing of it is left here; how many parkings and answers there were."""
        waiting = self._waiting.pop(trajectory_id, None) is not None
        answered = self._answers.pop(trajectory_id, None) is not None
        self._joined.pop(trajectory_id, None)
        return int(waiting), int(answered)

    async def use(self) -> RoomUse:
        oldest = min((one.since_ms for one in self._waiting.values()), default=None)
        return RoomUse(len(self._waiting), oldest, len(self._kept()))
