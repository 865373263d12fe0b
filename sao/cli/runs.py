"""Which run a command is about: a run's folder as `sao up` makes it, or a run file, which is all that a pod has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import typer

from sao.config import ConfigError, RunConfig, load_run_config
from sao.supervisor.folder import RunFolder


@dataclass(frozen=True, slots=True)
class Run:
    """One run, as its commands find it."""

    config: RunConfig
    """With what the environment sets (`SAO__...`), as the services read it."""
    root: Path
    """Its folder: of a run file, `run.dir`."""
    file: Path
    """What the configuration was read from."""


def names_a_file(named: Path) -> bool:
    """Whether a RUN argument means a run file, there or not; a run's folder otherwise."""
    return named.is_file() or (named.suffix == ".toml" and not named.is_dir())


def find_run(named: Path) -> Run:
    """The run that a RUN argument means; ends the command with exit status 2 where there is none."""
    by_file = names_a_file(named)
    file = named if by_file else RunFolder(named).run_file
    if not file.is_file():
        refuse(f"{file} does not exist: name the folder of a run, or a run file")
    config = load(file)
    return Run(config, config.run.dir if by_file else named, file)


def load(file: Path) -> RunConfig:
    """The run file's configuration; ends the command with exit status 2 and the key where it is wrong."""
    try:
        return load_run_config(file)
    except ConfigError as error:
        refuse(f"configuration error: {error}")


def refuse(message: str) -> NoReturn:
    """End the command: a wrong argument."""
    typer.echo(message, err=True)
    raise typer.Exit(2)
