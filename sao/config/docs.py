"""`python -m sao.config.docs` writes the table of settings in docs/configuration.md from the schema."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from sao.config.keys import Setting, all_settings, alternatives, nested_tables

BEGIN = "<!-- settings: begin (python -m sao.config.docs) -->"
END = "<!-- settings: end -->"
PAGE = Path("docs/configuration.md")


def settings_tables() -> str:
    """One Markdown table for each section of the run file."""
    sections: dict[str, list[Setting]] = {}
    for setting in all_settings():
        sections.setdefault(setting.section, []).append(setting)
    tables = []
    for name, settings in sections.items():
        tables.append(_table(name, [setting for setting in settings if not nested_tables(setting.field)]))
        tables += [table for setting in settings for table in _nested(setting)]
    return "\n\n".join(tables)


def _nested(setting: Setting) -> list[str]:
    """The tables inside a table: of `[a.b]`, or of each kind of `[a.b.NAME]`."""
    models = nested_tables(setting.field)
    name = setting.key if models[:1] == (setting.field.annotation,) else f"{setting.key}.NAME"
    found = []
    for model in models:
        settings = [Setting(name, key, field) for key, field in model.model_fields.items() if key != "kind"]
        kind = get_args(model.model_fields["kind"].annotation)[0] if "kind" in model.model_fields else None
        heading, _, rows = _table(name, settings).partition("\n")
        found.append(f'{heading}, `kind = "{kind}"`\n{rows}' if kind else f"{heading}\n{rows}")
    return found


def with_current_tables(page: str) -> str:
    """The page with what stands between its two markers replaced; ValueError when a marker is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        msg = f"the page needs the lines {BEGIN!r} and {END!r}"
        raise ValueError(msg)
    return f"{before}{BEGIN}\n\n{settings_tables()}\n\n{END}{after}"


def main() -> None:
    """Rewrite the page in place."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("page", type=Path, nargs="?", default=PAGE)
    path: Path = parser.parse_args().page
    path.write_text(with_current_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


def _table(section: str, settings: list[Setting]) -> str:
    rows = [f"### `[{section}]`", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for setting in settings:
        kind = _type(setting.field)
        cells = [f"`{setting.name}`", kind, _default(setting.field), setting.field.description or ""]
        rows.append("| " + " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    match field.get_default():
        case None:
            return "none"
        case str() | Path() as text:
            return f'`"{text}"`'
        case float() as number:
            return f"`{number:g}`"
        case list() | tuple() as items:
            return f"`{list(items)}`"
        case value:
            return f"`{value}`".lower()


def _type(field: FieldInfo) -> str:
    kinds = [_name(kind) for kind in alternatives(field.annotation) if kind is not NoneType]
    bounds = _bounds(field)
    return " or ".join(dict.fromkeys(kinds)) + (f" {bounds}" if bounds else "")


def _name(kind: Any) -> str:  # noqa: ANN401
    if get_origin(kind) is Literal:
        return " or ".join(f'`"{choice}"`' for choice in get_args(kind))
    if get_origin(kind) in {list, tuple, dict}:
        inner = dict.fromkeys(_name(part) for arg in get_args(kind) for part in alternatives(arg))
        return f"table of {list(inner)[-1]}" if get_origin(kind) is dict else f"list of {', '.join(inner)}"
    names = {
        "str": "text",
        "int": "integer",
        "float": "number",
        "bool": "boolean",
        "Path": "path",
        "SecretStr": "secret",
    }
    name: str = kind.__name__
    return names.get(name, name)


def _bounds(field: FieldInfo) -> str:
    found = []
    for rule in field.metadata:
        match rule:
            case annotated_types.Gt(bound):
                found.append(f"> {bound}")
            case annotated_types.Ge(bound):
                found.append(f"≥ {bound}")
            case annotated_types.Lt(bound):
                found.append(f"< {bound}")
            case annotated_types.Le(bound):
                found.append(f"≤ {bound}")
            case _:
                continue
    return ", ".join(found)


if __name__ == "__main__":
    main()
