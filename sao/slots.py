"""A set of slots (sao.streams.dispatch) that is mostly one beginning: kept as ranges, so that a hole costs one pair."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence


class Slots:
    """Non-negative integers as ascending, disjoint half-open ranges that do not touch."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self._starts.append(start)
            self._ends.append(end)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))

    @property
    def frontier(self) -> int:
        """The smallest integer that is not in it."""
        return self._ends[0] if self._starts and self._starts[0] == 0 else 0

    def beyond(self) -> Iterator[int]:
        """Those above the frontier, ascending."""
        for start, end in self.ranges:
            if start > 0:
                yield from range(start, end)

    def add(self, slot: int) -> None:
        """Put one in; one that is in it changes nothing."""
        i = bisect_right(self._starts, slot)
        if i > 0 and slot < self._ends[i - 1]:
            return
        after_one = i > 0 and self._ends[i - 1] == slot
        before_one = i < len(self._starts) and self._starts[i] == slot + 1
        if after_one and before_one:
            self._ends[i - 1] = self._ends.pop(i)
            del self._starts[i]
        elif after_one:
            self._ends[i - 1] = slot + 1
        elif before_one:
            self._starts[i] = slot
        else:
            self._starts.insert(i, slot)
            self._ends.insert(i, slot + 1)

    def __contains__(self, slot: int) -> bool:
        i = bisect_right(self._starts, slot)
        return i > 0 and slot < self._ends[i - 1]
