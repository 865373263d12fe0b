"""A user's own function, in a thread of its scorer's own pool."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

from sao.config import ConfigError
from sao.config.schema import SCORER_ENTRY_POINTS, PythonScorerSection
from sao.tasks.base import Scorer
from services.reward.pool import ThreadPool
from services.reward.scorers.base import ScoringRequest, checked, mapping_of


class PythonScorer:
    """`target` is called with (trajectory, tokenizer) and gives a number for each component."""

    kind: str = "python"
    judges: bool = False
    bounds: tuple[float, float] | None = None

    def __init__(self, name: str, section: PythonScorerSection) -> None:
        """ConfigError with the key `reward.scorers.NAME.target` when that leads to nothing callable."""
        self.name = name
        self.components: Mapping[str, str] = section.components
        self.deadline_s = section.deadline_s
        self.concurrency = section.concurrency
        self._call = load_target(section.target, key=f"reward.scorers.{name}.target")
        self._pool = ThreadPool[object](name, section.concurrency)

    async def score(self, request: ScoringRequest) -> Mapping[str, float]:
        call = partial(self._call, request.trajectory, request.tokenizer)
        found = await self._pool.run(call, self.deadline_s)
        return checked(mapping_of(found), self.components)

    async def close(self) -> None:
        """Threads end by themselves."""


def load_target(target: str, *, key: str) -> Scorer:
    """The function, or the object made of the class, that `module:attribute` or an entry point's name leads to.

    The working directory is importable, as it is for tasks. Raises ConfigError with `key`.
    """
    found = _attribute(target, key) if ":" in target else _entry_point(target, key)
    if inspect.isclass(found):
        try:
            found = found()
        except (Exception, SystemExit) as error:  # the user's own constructor
            raise ConfigError(key, f"{target} cannot be made: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigError(key, f"{target} is {type(found).__name__}, expected something to call")
    if inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(getattr(found, "__call__", None)):  # noqa: B004
        raise ConfigError(key, f"{target} is a coroutine function; write a plain one, it gets a thread of its own")
    scorer: Scorer = found
    return scorer


def _attribute(target: str, key: str) -> object:
    module_name, _, attribute = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except AttributeError as error:
        raise ConfigError(key, f"module {module_name} has no {attribute!r}") from error
    except (Exception, SystemExit) as error:  # the user's own module may raise anything while it is imported
        advice = "start from the folder that holds it, or install it"
        reason = f"cannot import {module_name} ({type(error).__name__}: {error}); {advice}"
        raise ConfigError(key, reason) from error


def _entry_point(target: str, key: str) -> object:
    offered = entry_points(group=SCORER_ENTRY_POINTS)
    if target not in offered.names:
        names = ", ".join(sorted(offered.names)) or "none"
        group = f"entry point of {SCORER_ENTRY_POINTS}; there are {names}"
        reason = f"{target!r} is neither package.module:attribute nor an {group}"
        raise ConfigError(key, reason)
    try:
        found: object = offered[target].load()
    except (Exception, SystemExit) as error:  # somebody's module
        raise ConfigError(key, f"entry point {target} cannot be loaded: {type(error).__name__}: {error}") from error
    return found
