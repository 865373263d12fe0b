"""`sao up` erases what is over its time in the logs that it has its processes write."""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue

from sao.config.schema import Hours
from sao.log_ages import erase_lines_before
from sao.retention import HOUR_S, pause_s, with_rest
from sao.supervisor.folder import RunFolder


class LogRetention:
    """Looks at the logs now and again, whenever it is asked.

    In a thread: a large log takes longer to read than the supervisor may leave its processes alone.
    """

    def __init__(self, folder: RunFolder, keep_h: Hours) -> None:
        self._folder = folder
        self._keep_h = keep_h
        self._next = time.monotonic()
        self._thread: threading.Thread | None = None
        self._ended: SimpleQueue[tuple[int, list[str]]] = SimpleQueue()

    def look(self) -> str:
        """Begin what is due; what went wrong in what has ended since the last look, in words, or nothing."""
        if self._keep_h != "forever" and not self.at_work and time.monotonic() >= self._next:
            self._next = time.monotonic() + pause_s(self._keep_h)
            before_s = time.time() - self._keep_h * HOUR_S
            self._thread = threading.Thread(target=self._pass, args=(before_s,), name="logs", daemon=True)
            self._thread.start()
        try:
            erased, left = self._ended.get_nowait()
        except Empty:
            return ""
        if erased:
            self._folder.note("erased", detail=f"{erased} lines of logs, over retention.logs_h")
        return f"lines over retention.logs_h are left: {with_rest(left)}" if left else ""

    @property
    def at_work(self) -> bool:
        """Whether a pass goes on."""
        return self._thread is not None and self._thread.is_alive()

    def _pass(self, before_s: float) -> None:
        erased, left = 0, list[str]()
        for path in sorted(self._folder.logs.glob("*.log*")):
            try:
                erased += erase_lines_before(path, before_s)
            except FileNotFoundError:
                continue  # rotated away meanwhile
            except OSError as error:
                left.append(f"{path}: {error.strerror}")
            except Exception as error:  # noqa: BLE001 - the thread's edge: logs never end a run
                left.append(f"{path}: {type(error).__name__}: {error}")
        self._ended.put((erased, left))
