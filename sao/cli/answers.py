"""What a service has answered over REST, for commands: the document, or its problem in words and exit code 1."""

from __future__ import annotations

from typing import Any

import httpx
import typer


def answered(response: httpx.Response, *, advice: str = "") -> dict[str, Any]:
    """The JSON object of a success; else typer.Exit(1) after the problem's detail and, if there is any, the advice."""
    try:
        found: Any = response.json()
    except ValueError:
        found = None
    if response.is_success and isinstance(found, dict):
        return found
    detail = found.get("detail") if isinstance(found, dict) else response.text[:300]
    typer.echo(f"HTTP {response.status_code}: {detail}", err=True)
    if advice:
        typer.echo(advice, err=True)
    raise typer.Exit(1)


def unreachable(url: str, error: Exception, *, otherwise: str) -> typer.Exit:
    """To raise when nobody answers: says who, why, and what to do; `otherwise` is another way than a run that is up."""
    typer.echo(f"{url}: {type(error).__name__}: {error}", err=True)
    typer.echo(f"Is the run up? `sao status RUN` says so; {otherwise}", err=True)
    return typer.Exit(1)
