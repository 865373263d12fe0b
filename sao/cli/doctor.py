"""`sao doctor`: check a deployment and say what to mend."""

from __future__ import annotations

import asyncio
import json as json_text
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from sao.cli.runs import find_run, refuse
from sao.config import RunConfig
from sao.doctor.checks import Check, Status, judge
from sao.doctor.edges import SERVICES, Role
from sao.doctor.probes import observe

Run = Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="A run file, or a run's folder.")]
RunDir = Annotated[Path | None, typer.Option("--run-dir", help="A run's folder.")]
Roles = Annotated[
    list[Role] | None, typer.Option("--as", help="Try the edges of this service only; repeatable. Default: all.")
]
Services = Annotated[
    list[str] | None,
    typer.Option("--service", metavar="NAME=URL", help="Where a service shows its telemetry; repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")]
Timeout = Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds that each probe may take.")]


def doctor(  # noqa: PLR0917  # typer reads the signature
    run: Run = None,
    run_dir: RunDir = None,
    as_: Roles = None,
    service: Services = None,
    json: AsJson = False,
    timeout: Timeout = 2.0,
) -> NoReturn:
    """Check a deployment from here: connections, tokens, store, engines, health, clocks, disks, versions.

    One line each: ok, warn or fail, what was found, what is expected, what to do. Changes nothing, prints no secret.
    Exit 0: nothing fails; 1: something does; 2: a wrong argument.

    Examples: `sao doctor --run-dir runs/mine`, in a worker's pod `sao doctor /etc/sao/run.toml --as rollout`.
    """
    config = _config(run, run_dir)
    config = config.model_copy(update={"redis": config.redis.model_copy(update={"timeout_s": timeout})})
    roles = list(dict.fromkeys(as_ or Role))
    seen = asyncio.run(observe(config, roles, _services(service or []), timeout_s=timeout))
    checks = judge(config, seen)
    if json:
        typer.echo(json_text.dumps([_as_json(check) for check in checks], indent=2))
    else:
        for check in checks:
            typer.echo(line(check))
        counts = {status: sum(check.status is status for check in checks) for status in Status}
        typer.echo(", ".join(f"{count} {status.value}" for status, count in counts.items()))
    raise typer.Exit(1 if any(check.status is Status.FAIL for check in checks) else 0)


def line(check: Check) -> str:
    """One check for people."""
    told = f"{check.status.value:<5}{check.name}: {check.found}"
    return told if check.status is Status.OK else f"{told}; expected {check.expected}; {check.do}"


def _as_json(check: Check) -> dict[str, str]:
    return {
        "check": check.name,
        "status": check.status.value,
        "found": check.found,
        "expected": check.expected,
        "do": check.do,
    }


def _services(given: list[str]) -> dict[str, str]:
    found = {}
    for one in given:
        name, _, url = one.partition("=")
        if name not in SERVICES or not url.startswith(("http://", "https://")):
            refuse(f"--service {one}: expected NAME=http://host:port, NAME one of {', '.join(SERVICES)}")
        found[name] = url
    return found


def _config(run: Path | None, run_dir: Path | None) -> RunConfig:
    if (run is None) == (run_dir is None):
        refuse("which run? Name a run file, or a run's folder with --run-dir")
    asked = run_dir or run
    assert asked is not None
    return find_run(asked).config
