"""Which distributions a module needs, read from its source and that of everything of ours that it imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from tools.locks import normalised

ROOT = Path(__file__).resolve().parents[3]


def file_of(module: str) -> Path | None:
    """The source of a module of this repository."""
    path = ROOT.joinpath(*module.split("."))
    found = [each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()]
    return found[0] if found else None


@cache
def _imported_by(file: Path) -> tuple[str, ...]:
    return tuple(_imports(ast.parse(file.read_text())))


def _imports(tree: ast.AST) -> Iterator[str]:
    """Every name imported at run time; from A import B gives A and A.B."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from _imports(node)


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())


@cache
def reached(entry: str) -> frozenset[str]:
    """Every name that starting `entry` may import, directly or through our modules."""
    waiting, done = [entry, f"{entry}.__main__"], set()
    while waiting:
        module = waiting.pop()
        if module in done:
            continue
        done.add(module)
        file = file_of(module)
        if file is not None:
            parents = module.split(".")[:-1]
            waiting += [".".join(parents[: count + 1]) for count in range(len(parents))]
            waiting += _imported_by(file)
    return frozenset(done)


def distributions(entry: str) -> set[str]:
    """Normalised names of the distributions that starting `entry` may import, directly or through our modules."""
    tops = {module.partition(".")[0] for module in reached(entry) if file_of(module) is None}
    others = {top for top in tops if not (ROOT / top).is_dir() and top not in sys.stdlib_module_names}
    return {normalised(name) for top in others for name in _distributions().get(top, [top])[:1]}
