"""UUIDv7 identifiers: unique, and their first 48 bits are the Unix time in milliseconds (RFC 9562)."""

from __future__ import annotations

import secrets
import time
import uuid


def uuid7(unix_ms: int | None = None) -> str:
    """A new UUIDv7 as a 36-character string; `unix_ms` defaults to now."""
    ms = time.time_ns() // 1_000_000 if unix_ms is None else unix_ms
    value = (ms & (2**48 - 1)) << 80 | 0x7 << 76 | secrets.randbits(12) << 64 | 0b10 << 62 | secrets.randbits(62)
    return str(uuid.UUID(int=value))


def uuid7_unix_ms(text: str) -> int:
    """The Unix time in milliseconds inside a UUIDv7; ValueError when `text` is not one."""
    value = uuid.UUID(text)
    if value.version != 7 or str(value) != text:
        msg = f"{text!r} is not a lower-case UUIDv7"
        raise ValueError(msg)
    return value.int >> 80
