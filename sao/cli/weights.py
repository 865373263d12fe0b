"""`sao weights`: look at the weight versions of a running run, roll back, hold, and let publishing go on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from sao.cli.answers import answered, unreachable
from sao.cli.runs import find_run, refuse
from sao.config import RunConfig

TIMEOUT_S = 60.0
"""A version is read whole before it is activated."""

weights = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Look at weight versions, and decide which one serves.

    **list** shows them. **activate** brings every engine to one, older or newer; **hold** keeps one from serving. After
    either, newer versions wait until **resume**. RUN is a run's folder, or a run file; the run must be up.""",
)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a run file.")]
Version = Annotated[str, typer.Argument(metavar="VERSION", help="As `list` shows it.")]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Kept with the hold, shown by `sao status`.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")]


@weights.command("list")
def list_versions(run: Run, as_json: AsJson = False) -> None:
    """List the versions in the store, oldest first: what became of each, and who serves it.

    Example: `sao weights list runs/mine`.
    """
    view = _ask(run, "GET", "")
    if as_json:
        typer.echo(json.dumps(view, indent=2))
        return
    for line in _table(view["versions"]):
        typer.echo(line)
    _tell(view)


@weights.command()
def activate(run: Run, version: Version, reason: Reason = "") -> None:
    """Bring every engine to this version, older or newer; newer ones wait until `resume`.

    Example: `sao weights activate runs/mine v00000041 --reason "style collapsed"`.
    """
    _tell(_ask(run, "POST", f"/{quote(version, safe='')}:activate", reason))


@weights.command()
def hold(run: Run, version: Version, reason: Reason = "") -> None:
    """Never roll this version out, and nothing newer either until `resume`; engines leave it when they serve it.

    Example: `sao weights hold runs/mine v00000042 --reason "insults people"`.
    """
    _tell(_ask(run, "POST", f"/{quote(version, safe='')}:hold", reason))


@weights.command()
def resume(run: Run, reason: Reason = "") -> None:
    """Let publishing go on: the newest version that `hold` does not keep back serves next, whatever a guard said.

    Example: `sao weights resume runs/mine`.
    """
    _tell(_ask(run, "POST", ":resume", reason))


def _ask(run: Path, method: str, path: str, reason: str = "") -> dict[str, Any]:
    config = _config(run)
    host = "127.0.0.1" if config.weights.bind in {"0.0.0.0", "::"} else config.weights.bind  # noqa: S104  # compared
    url = f"http://{f'[{host}]' if ':' in host else host}:{config.weights.port}/v1/weights{path}"
    token = config.auth.token
    headers = {"Authorization": f"Bearer {token.get_secret_value()}"} if token is not None else {}
    body = {"reason": reason} if reason else None
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False, headers=headers) as http:
            response = http.request(method, url, json=body)
    except httpx.RequestError as error:
        raise unreachable(url, error, otherwise="`sao up --run-dir RUN` starts it again.") from None
    return answered(response)


def _config(run: Path) -> RunConfig:
    found = find_run(run)
    if found.config.weights.port == 0:
        refuse(f"{found.file} leaves weights.port open: name the folder of a run that was started, it has the port")
    return found.config


def _table(versions: list[dict[str, Any]]) -> Iterator[str]:
    rows = [("version", "update", "state", "created (UTC)", "MiB", "serving", "why")]
    for one in versions:
        created = datetime.fromtimestamp(one["created_s"], UTC)
        held = f"{one['held']['by']}: {one['held']['reason']}" if one["held"] else ""
        why = one["refused"] or held or ("pinned" if one["pinned"] else "")
        cells = (one["version"], str(one["update"]), one["state"], f"{created:%Y-%m-%d %H:%M:%S}")
        rows.append((*cells, f"{one['bytes'] / 2**20:.1f}", ", ".join(one["serving"]) or "-", " ".join(why.split())))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _tell(view: Mapping[str, Any]) -> None:
    publishing = view["publishing"]
    typer.echo(f"target {view['target'] or '-'}, newest published {view['published'] or '-'}")
    if not publishing["held"]:
        typer.echo("publishing goes on")
        return
    why = f": {publishing['reason']}" if publishing["reason"] else ""
    by = f" from {publishing['client']}" if publishing["client"] else ""
    typer.echo(f"publishing is held at {publishing['version']} by {publishing['by']}{by}{why}")
