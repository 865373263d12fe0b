"""The record of routed experts of an episode, put together from those of its turns."""

from __future__ import annotations

from collections.abc import Sequence

from sao.routing import NO_RECORD
from services.rollout.engines.base import Span


def extended(known: bytes, added: bytes, prompt_tokens: int, spans: Sequence[Span], row_bytes: int) -> bytes:
    """`known`, the rows on record before a turn, followed by those that the turn adds, up to its last token but one.

    So a row stays with the turn that covered it first, and the row before an action token comes from the turn that
    sampled it, though a later turn may compute its prompt (`prompt_tokens` long) again with newer weights. Within one
    turn that happens too: an engine that retracts a request for new weights computes all of it again. The rows that
    sampled tokens of a span before the turn's last one are then lost: NO_RECORD.
    """
    rows = known + added
    first = (prompt_tokens - 1) * row_bytes
    end = first + spans[-1].start * row_bytes
    return rows[:first] + bytes([NO_RECORD]) * (end - first) + rows[end:]


def completed(known: bytes, tokens: int, row_bytes: int) -> bytes:
    """`known` for all of a trajectory of `tokens` tokens: no forward has covered an observation at its end."""
    return known + bytes([NO_RECORD]) * ((tokens - 1) * row_bytes - len(known))
