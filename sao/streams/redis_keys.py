"""How fields and counters are written down in Redis."""

from __future__ import annotations

from collections.abc import Mapping

from sao.streams.base import DeadEvent, kind_of


def flat(fields: Mapping[str, str]) -> list[str]:
    """Name, value, name, value, ... as XADD takes them."""
    return [text for pair in fields.items() for text in pair]


def counter_of(event: DeadEvent, reason: str) -> str:
    """The field of `dead-totals` that counts this."""
    return f"{event.value}:{kind_of(reason)}"
