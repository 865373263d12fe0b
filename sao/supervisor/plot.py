"""A curve in characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

BLOCKS = " ▁▂▃▄▅▆▇█"


def resampled(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: means of equal stretches, in order."""
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def plot(values: Sequence[float], width: int, height: int, low: float, high: float) -> list[str]:
    """`height` lines of blocks, top first, for values between low and high (others are clipped)."""
    if not low < high:
        msg = f"low {low} must lie below high {high}"
        raise ValueError(msg)
    steps = len(BLOCKS) - 1
    eighths = [
        round((min(max(value, low), high) - low) / (high - low) * height * steps) for value in resampled(values, width)
    ]
    return [
        "".join(BLOCKS[min(max(level - row * steps, 0), steps)] for level in eighths) for row in reversed(range(height))
    ]
