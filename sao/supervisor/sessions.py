"""Find and end everything that a child started: a child leads its own session, and the session names them all.

A session is asked, not the process group alone: a wrapper such as `timeout` makes a group of its own inside it.
Standard library only, because the guard imports it. Linux only (/proc).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path


def members(session: int) -> list[int]:
    """Live processes of a session; zombies are not counted, nobody may be there to reap them."""
    return [pid for pid, owner in _live_sessions().items() if owner == session]


def end_sessions(
    sessions: Collection[int],
    *,
    grace_s: float,
    kill_s: float = 5.0,
    reap: Callable[[], object] = lambda: None,
) -> list[int]:
    """SIGTERM to every member, SIGKILL to what is left after `grace_s`; the pids that outlived `kill_s` more.

    `reap` is called while waiting, so that own children do not stay as zombies. `grace_s` 0: SIGKILL at once.
    """
    wanted = set(sessions)
    if grace_s > 0:
        left = _signal(wanted, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while left and time.monotonic() < deadline:
            reap()
            time.sleep(0.02)
            left = _members_of(wanted)
    deadline = time.monotonic() + kill_s
    # Again and again: a member that was just forking may have a child the first look did not see.
    while (left := _signal(wanted, signal.SIGKILL)) and time.monotonic() < deadline:
        reap()
        time.sleep(0.02)
    reap()
    return left


def _signal(sessions: set[int], number: signal.Signals) -> list[int]:
    found = _members_of(sessions)
    for pid in found:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
    return found


def _members_of(sessions: set[int]) -> list[int]:
    return [pid for pid, session in _live_sessions().items() if session in sessions]


def _live_sessions() -> dict[int, int]:
    """The session of every live process by pid.

    Source: proc(5); after the command's closing parenthesis, state is the first field and session the fourth.
    """
    result = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _parent, _group, session = stat.rpartition(")")[2].split()[:4]
        if state not in {"Z", "X"}:
            result[int(entry.name)] = int(session)
    return result
