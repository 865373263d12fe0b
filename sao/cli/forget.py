"""`sao forget`: erase the text of trajectories from everywhere a run keeps it."""

from __future__ import annotations

import asyncio
import json as json_text
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from sao.cli.runs import find_run, refuse
from sao.config import RunConfig
from sao.forgetting import Finding, Place
from sao.forgetting import forget as forget_everywhere
from sao.ids import uuid7_unix_ms
from sao.tasks import TaskLoadError, load_task
from sao.tasks.tiny_tokenizer import VocabularyError, tokenizer_of_run
from sao.tokenizer import Tokenizer

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a run file.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Trajectory ids.")]
Places = Annotated[list[Place] | None, typer.Option("--place", help="Only there; repeatable. Default: everywhere.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")]


def forget(run: Run, ids: Ids, place: Places = None, json: AsJson = False) -> NoReturn:
    """Erase prompt, actions, observations and task payload of trajectories, for ever; ids and numbers stay.

    From the store and its files, archive, spools, dead folder and logs; the run may go on meanwhile. What was still to
    be trained is dropped, counted as `forgotten`. Exit 0: nothing is left; 1: a place could not be reached, which is
    named (repeat it there); 2: a wrong argument.

    Examples: `sao forget runs/mine ID`, `sao forget /etc/sao/run.toml ID --place spool`.
    """
    config = find_run(run).config
    for one in ids:
        try:
            uuid7_unix_ms(one)
        except ValueError:
            refuse(f"{one!r} is no trajectory id: expected a lower-case UUIDv7, as `sao trajectories tail` shows it")
    findings = asyncio.run(forget_everywhere(config, list(dict.fromkeys(ids)), place or Place, _tokenizer(config)))
    if json:
        typer.echo(json_text.dumps([_as_json(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            typer.echo(_line(finding))
    raise typer.Exit(1 if any(finding.problem for finding in findings) else 0)


def _line(finding: Finding) -> str:
    found = ", ".join(f"{count} {what}" for what, count in finding.erased.items())
    said = f"erased {found}" if found else "nothing found"
    if finding.problem:
        said = f"NOT DONE{f' ({said})' if found else ''}: {finding.problem}"
    return f"{finding.place.value:<8}{finding.where}  {said}"


def _as_json(finding: Finding) -> dict[str, object]:
    return {
        "place": finding.place.value,
        "where": finding.where,
        "erased": finding.erased,
        "problem": finding.problem or None,
    }


def _tokenizer(config: RunConfig) -> Tokenizer | None:
    try:
        return tokenizer_of_run(config.model.path, load_task(config.task.name))
    except (OSError, TaskLoadError, VocabularyError):
        return None
    except Exception as error:
        if type(error) is Exception:  # the tokenizers library's own, for a missing or damaged file
            return None
        raise
