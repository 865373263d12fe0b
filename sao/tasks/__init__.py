"""The tasks that come with sao, and the door for your own: `load_task("package.module:ClassName")`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from sao.tasks.base import Task

BUILT_IN = {
    "calculator": "sao.tasks.calculator:Calculator",
    "writing": "sao.tasks.writing:Writing",
}
"""Short names of our own tasks; each is loaded by the same path as a user's."""

_REQUIRED = ("name", "prompts_path", "heldout_prompts_path", "default_preference", "components", "episode", "score")


class TaskLoadError(ValueError):
    """`task.name` leads to no usable task; the message says what was found and what to do."""


def load_task(name: str) -> Task:
    """The task of this name: a built-in one, or `package.module:ClassName`, made without arguments.

    The working directory is importable, as it is under `python -m`. Raises TaskLoadError.
    """
    target = BUILT_IN.get(name, name)
    module_name, colon, class_name = target.partition(":")
    if not (colon and module_name and class_name):
        msg = f"task {name!r} is none of {', '.join(BUILT_IN)} and not of the form package.module:ClassName"
        raise TaskLoadError(msg)
    here = str(Path.cwd())
    if name not in BUILT_IN and here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        msg = (
            f"task {name!r}: cannot import {module_name} ({error}); start from the folder that holds it, or install it"
        )
        raise TaskLoadError(msg) from error
    made = getattr(module, class_name, None)
    if not callable(made):
        msg = f"task {name!r}: {module_name} has no class {class_name}"
        raise TaskLoadError(msg)
    return _checked(name, made())


def _checked(name: str, task: Task) -> Task:
    missing = [attribute for attribute in _REQUIRED if not hasattr(task, attribute)]
    if missing:
        msg = f"task {name!r} lacks {', '.join(missing)}: see sao.tasks.base.Task"
        raise TaskLoadError(msg)
    unknown = sorted(task.default_preference.components - frozenset(task.components))
    if unknown:
        msg = f"task {name!r}: default_preference reads {unknown}, components are {sorted(task.components)}"
        raise TaskLoadError(msg)
    return task
