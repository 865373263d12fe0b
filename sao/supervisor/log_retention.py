"""`sao up` erases what is over its time in the logs that it has its processes write."""

from __future__ import annotations

import time

from sao.config.schema import Hours
from sao.log_ages import erase_lines_before
from sao.retention import HOUR_S, pause_s, with_rest
from sao.supervisor.folder import RunFolder


class LogRetention:
    """Looks at the logs now and again, whenever it is asked."""

    def __init__(self, folder: RunFolder, keep_h: Hours) -> None:
        self._folder = folder
        self._keep_h = keep_h
        self._next = time.monotonic()

    def look(self) -> str:
        """Do what is due; what went wrong, in words, or nothing."""
        if self._keep_h == "forever" or time.monotonic() < self._next:
            return ""
        self._next = time.monotonic() + pause_s(self._keep_h)
        before_s, erased, left = time.time() - self._keep_h * HOUR_S, 0, list[str]()
        for path in sorted(self._folder.logs.glob("*.log*")):
            try:
                erased += erase_lines_before(path, before_s)
            except FileNotFoundError:
                continue  # rotated away meanwhile
            except OSError as error:
                left.append(f"{path}: {error.strerror}")
        if erased:
            self._folder.note("erased", detail=f"{erased} lines of logs, over retention.logs_h")
        return f"lines over retention.logs_h are left: {with_rest(left)}" if left else ""
