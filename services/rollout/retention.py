"""Erases files of trajectories that nobody will take any more, once they are over their time."""

from __future__ import annotations

import re
from pathlib import Path

from sao.ids import uuid7_unix_ms
from sao.retention import Pass, with_rest

_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


def erase_files(folder: Path, pattern: str, before_ms: int) -> Pass:
    """Remove the files below `folder`, by this glob, that are named after a trajectory which began before this time.

    Half-written ones too; what is named after none stays. Several processes may do so at once; each counts its own.
    """
    erased, problems = 0, list[str]()
    for path in sorted(folder.glob(pattern)):
        name = _ID.search(path.name)
        if name is None or uuid7_unix_ms(name[0]) >= before_ms:
            continue
        try:
            path.unlink()
        except FileNotFoundError:
            continue  # another one was faster
        except OSError as error:
            problems.append(f"{path} cannot be removed: {error.strerror}; make its folder writable")
        else:
            erased += 1
    return Pass(erased, with_rest(problems))
