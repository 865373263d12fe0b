"""What can be told of a Python scorer's target without running it: its module may load a model when it is imported.

The module is looked for and its source is read; of a package only `__init__` is run. What isn't on this machine may be
on the one that scores, so that is a warning; a module that is here and has no such name is an error.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from sao.config import ConfigError, RunConfig
from sao.config.doubts import Doubt
from sao.config.schema import SCORER_ENTRY_POINTS, PythonScorerSection


def refuse_missing_targets(config: RunConfig) -> list[Doubt]:
    """ConfigError for a target whose module is here without it; a doubt for each that is not here at all."""
    found = []
    for name, section in config.reward.scorers.items():
        key = f"reward.scorers.{name}.target"
        if isinstance(section, PythonScorerSection) and (why := _missing(section.target, key)):
            found.append(Doubt(key, why))
    return found


def _missing(target: str, key: str) -> str:
    module, colon, attribute = target.partition(":")
    if not colon:
        offered = entry_points(group=SCORER_ENTRY_POINTS).names
        if target in offered:
            return ""
        there = ", ".join(sorted(offered)) or "none"
        return f"no entry point {target!r} of {SCORER_ENTRY_POINTS} on this machine; there are {there}"
    here = str(Path.cwd())
    if here not in sys.path:  # as for tasks, and where it is loaded
        sys.path.append(here)
    try:
        spec = find_spec(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a package's own __init__ may raise anything
        return f"module {module} cannot be looked for ({type(error).__name__}: {error})"
    if spec is None:
        return f"no module {module} on this machine: start from the folder that holds it, or install it"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    try:
        names = _names(ast.parse(Path(spec.origin).read_bytes()).body)
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(key, f"module {module} cannot be read: {error}") from error
    if attribute not in names and not names & {"*", "__getattr__"}:
        raise ConfigError(key, f"module {module} has no {attribute!r}: see {spec.origin}")
    return ""


def _names(body: Sequence[ast.stmt]) -> set[str]:
    """Whatever these statements may bind; `*` for names that only an import can tell."""
    return {name for statement in body for name in _bound(statement)}


def _bound(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield statement.name
        case ast.Import() | ast.ImportFrom():
            yield from (one.asname or one.name.partition(".")[0] for one in statement.names)
        case _:
            # Targets of assignments, loops and `with`, and what stands in blocks.
            for part in ast.iter_child_nodes(statement):
                if isinstance(part, ast.stmt):
                    yield from _bound(part)
                elif isinstance(part, ast.ExceptHandler | ast.match_case):
                    yield from _names(part.body)
                else:
                    yield from (one.id for one in ast.walk(part) if isinstance(one, ast.Name) and _stored(one))


def _stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)
