"""The beginning of a log that is over its time, overwritten in place: whoever writes to the file goes on undisturbed.

A line's time is its own where it has one: `time` of our JSON lines, or the date that others begin theirs with. A line
without one (of a traceback, say) was written before the next line that has one, or before the file was last written to.
"""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

_ISO = re.compile(rb"\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)")
_IN_WORDS = re.compile(rb"\d+:[A-Z] (\d\d? [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d)")
"""Of Valkey and Redis."""


def erase_lines_before(path: Path, unix_s: float) -> int:
    """Overwrite every line of the file's beginning that is older than this; how many were not blank.

    The file keeps its length and its time. What stands after the first line that is young enough stays.
    """
    with path.open("r+b") as file:
        before = os.fstat(file.fileno())
        end = _end_of_old(file, unix_s, written_s=before.st_mtime)
        erased = start = 0
        file.seek(0)
        while start < end:
            line = file.readline()
            if line.strip():
                os.pwrite(file.fileno(), b" " * len(line.rstrip(b"\n")), start)
                erased += 1
            start += len(line)
        if erased:
            os.fsync(file.fileno())
            if os.fstat(file.fileno()).st_size == before.st_size:
                os.utime(file.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))
    return erased


def _end_of_old(file: BinaryIO, unix_s: float, *, written_s: float) -> int:
    """How many bytes from the beginning on are older for certain."""
    old = position = 0
    for line in file:
        position += len(line)
        if (at_s := time_of(line)) is None:
            continue
        if at_s >= unix_s:
            return old
        old = position
    return position if written_s < unix_s else old


def time_of(line: bytes) -> float | None:
    """Unix seconds at which a log line was written, where it says so; local time where it names no zone."""
    try:
        if line.startswith(b"{"):
            return datetime.fromisoformat(json.loads(line)["time"]).timestamp()
        if found := _ISO.match(line):
            return datetime.fromisoformat(found[1].decode()).timestamp()
        if found := _IN_WORDS.match(line):
            return datetime.strptime(found[1].decode(), "%d %b %Y %H:%M:%S").timestamp()  # noqa: DTZ007 - local time
    except (ValueError, KeyError, TypeError, RecursionError):
        return None  # a line that only looks like one with a date
    return None
