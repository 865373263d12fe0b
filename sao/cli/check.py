"""`sao check`: what a run file comes to, before it costs anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sao.cli.scorer_check import refuse_missing_targets
from sao.cli.task_check import refuse_unusable_task
from sao.config import ConfigError, RunConfig, dump_run_config, load_run_config
from sao.config.derived import Figure, figures
from sao.config.doubts import doubts
from sao.config.dump import without_password
from sao.config.fits import refuse_what_cannot_fit, verdict
from sao.config.keys import all_settings, section_of
from sao.routing import expected_routing

RunFile = Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="The run file; none: the preset alone.")]
Preset = Annotated[str | None, typer.Option(help="A preset to start from; the run file may name one itself.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c", help="One setting; may be repeated.")]
AsToml = Annotated[bool, typer.Option("--toml", help="Print the effective configuration as a run file, nothing else.")]


def check(run_file: RunFile = None, preset: Preset = None, sets: Sets = None, toml: AsToml = False) -> None:
    """Print effective settings, what follows from them, and warnings; exit 2 with the key's name when one is wrong."""
    try:
        config = load_run_config(run_file, sets or (), preset=preset)
        not_here = refuse_unusable_task(config)
        expected_routing(config)  # refuses a model without a router
        refuse_what_cannot_fit(config)
        elsewhere = refuse_missing_targets(config)
    except ConfigError as error:
        typer.echo(f"configuration error: {error}", err=True)
        raise typer.Exit(2) from None
    if toml:
        typer.echo(dump_run_config(config), nl=False)
        return
    console = Console(soft_wrap=False)
    console.print(_settings(config))
    console.print(_figures(config))
    console.print(Text.assemble(("memory ", "bold"), verdict(config)), soft_wrap=True)
    if not_here is not None:
        console.print(
            Text.assemble(("warning ", "bold yellow"), ("task.name", "bold"), f": {not_here}"), soft_wrap=True
        )
    for doubt in [*elsewhere, *doubts(config)]:
        console.print(
            Text.assemble(("warning ", "bold yellow"), (doubt.key, "bold"), f": {doubt.text}"), soft_wrap=True
        )


def _settings(config: RunConfig) -> Table:
    table = Table("setting", "value", "default", title="Effective configuration", title_justify="left")
    defaults = RunConfig()
    previous = ""
    for setting in all_settings():
        section = section_of(config, setting.section)
        if section is None:
            continue
        if previous not in {"", setting.section}:
            table.add_section()
        previous = setting.section
        value = getattr(section, setting.name)
        if setting.key == "redis.url":
            value = without_password(value)
        default = getattr(section_of(defaults, setting.section), setting.name, None)
        changed = value != default
        shown = Text(_shown(value), style="bold" if changed else "")
        table.add_row(Text(setting.key), shown, Text(_shown(default) if changed else ""))
    return table


def _figures(config: RunConfig) -> Table:
    table = Table("derived", "value", "because", title="What follows", title_justify="left")
    for figure in figures(config):
        table.add_row(figure.name, _amount(figure), Text(figure.because))
    return table


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def _amount(figure: Figure) -> str:
    if figure.value is None:
        return "unknown"
    if figure.unit == "bytes":
        return _bytes(figure.value)
    if figure.unit == "":
        return f"{figure.value:g}"
    number = f"{figure.value:,.0f}" if float(figure.value).is_integer() else f"{figure.value:,.2f}"
    return f"{number} {figure.unit}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
