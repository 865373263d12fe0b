"""`sao dead`: look at the trajectories that nobody could use, and decide what becomes of them."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from google.protobuf.message import DecodeError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sao import streams as trajectory_streams
from sao.cli.dead_views import by_kind, letter_rows, letters_lines, totals_lines, trajectory_rows
from sao.cli.runs import find_run, refuse
from sao.config import RunConfig
from sao.dead_letters import Wanted, find, letter_as_json, trajectory_as_json, with_ids, with_reason
from sao.streams.base import DeadLetter, DeadTotals, RequeueStatus, StreamError, TrajectoryStreams
from sao.trajectory import Trajectory

T = TypeVar("T")

dead = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Look at trajectories that could not be scored or trained on, and decide what becomes of them.

    **list** shows them, **show** tells what one holds and why it died. Once the cause is mended, **requeue** puts them
    back where they were; **drop** deletes them. RUN is a run's folder or a run file; the run's store must be up.""",
)

Run = Annotated[
    str | None, typer.Argument(metavar="RUN", help="A run's folder, or a run file; left out with --config.")
]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Trajectory ids, as `list` shows them.")]
RunFile = Annotated[Path | None, typer.Option("--config", metavar="RUN.toml", help="A run file, instead of RUN.")]
Reason = Annotated[str | None, typer.Option(metavar="TEXT", help="Those whose reason contains this.")]
All = Annotated[bool, typer.Option("--all", help="All of them.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")]


@dataclass(frozen=True)
class _Target:
    config: RunConfig
    words: str
    """How the command line names the run."""
    ids: list[str]


@dataclass(frozen=True)
class _Done:
    letters: Counter[str]
    """Those that it was done to, by kind of reason."""
    problems: list[str]


@dead.command("list")
def list_letters(
    run: Run = None,
    config: RunFile = None,
    reason: Reason = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List dead letters, newest first: trajectory, stream, deliveries, age, task, why.

    Examples: `sao dead list runs/mine`, `sao dead list runs/mine --reason timeout`.
    """
    target = _target(run, config, None)
    if target.ids:
        refuse(f"two runs: {target.ids[0]} and {config}; name one")
    letters, totals = _with_streams(target, lambda streams: _listed(streams, reason or ""))
    if as_json:
        typer.echo(json.dumps([letter_as_json(letter) for letter in letters[:limit]], indent=2))
        return
    if letters:
        for line in letters_lines(letters[:limit]):
            typer.echo(line)
        typer.echo(f"{min(limit, len(letters))} of {len(letters)}; `sao dead show {target.words} ID` tells more of one")
    else:
        typer.echo("no dead letters" + (f" whose reason contains {reason!r}" if reason else ""))
    for line in totals_lines(totals, target.config.redis.dead_letters_mb):
        typer.echo(line)


async def _listed(streams: TrajectoryStreams, reason: str) -> tuple[list[DeadLetter], DeadTotals]:
    return await find(streams, with_reason(reason)), await streams.dead_totals()


@dead.command()
def show(run: Run = None, ids: Ids = None, config: RunFile = None, as_json: AsJson = False) -> None:
    """Tell what one dead letter holds: why it died, how its scoring ended, the trajectory itself.

    Examples: `sao dead show runs/mine ID`, `sao dead show runs/mine ID --json`.
    """
    target = _target(run, config, ids)
    if len(target.ids) != 1:
        refuse(f"{len(target.ids)} ids, expected one: `sao dead list {target.words}` shows them")
    letter, payload = _with_streams(target, lambda streams: _opened(streams, target.ids[0]))
    if letter is None:
        typer.echo(_missing(target, target.ids[0]), err=True)
        raise typer.Exit(1)
    trajectory, damage = _decoded(payload)
    if as_json:
        body = trajectory_as_json(trajectory) if trajectory is not None else None
        typer.echo(json.dumps({**letter_as_json(letter), "trajectory": body, "damage": damage}, indent=2))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    body_rows = trajectory_rows(trajectory, target.config) if trajectory is not None else [("payload", damage)]
    for name, value in (*letter_rows(letter), *body_rows):
        table.add_row(Text(name, style="bold"), Text(value))
    Console().print(table)
    does = "puts it back" if payload is not None else "is refused: nothing is left to work on"
    typer.echo(f"`sao dead requeue {target.words} {letter.trajectory_id}` {does}; `sao dead drop ...` deletes it")


async def _opened(streams: TrajectoryStreams, trajectory_id: str) -> tuple[DeadLetter | None, bytes | None]:
    letters = await find(streams, with_ids([trajectory_id]))
    return (letters[0], await streams.payload(trajectory_id)) if letters else (None, None)


def _decoded(payload: bytes | None) -> tuple[Trajectory | None, str]:
    """The trajectory, or what is wrong with its payload."""
    if payload is None:
        return None, "gone from the store"
    try:
        return Trajectory.from_bytes(payload), ""
    except DecodeError:
        return None, f"{len(payload)} bytes that are no trajectory"


@dead.command()
def requeue(
    run: Run = None, ids: Ids = None, config: RunFile = None, reason: Reason = None, everything: All = False
) -> None:
    """Put dead letters back on the stream they came from, to be delivered anew. Mend first what they died of.

    Each goes in one step, counts as unconsumed work again and has all its deliveries before it. Refused where the
    payload is gone. Exit 1 when any was not requeued.

    Examples: `sao dead requeue runs/mine ID`, `sao dead requeue runs/mine --reason infra_failed`.
    """
    target = _target(run, config, ids)
    wanted = _selection(target, reason, everything)

    async def put_back(streams: TrajectoryStreams, letter: DeadLetter) -> str:
        match await streams.requeue_dead(letter):
            case RequeueStatus.REQUEUED:
                return ""
            case RequeueStatus.NO_PAYLOAD:
                return f"{letter.trajectory_id}: its payload is gone, it can only be dropped"
            case RequeueStatus.GONE:
                return f"{letter.trajectory_id}: somebody else has requeued or dropped it"

    _report("requeued", _with_streams(target, lambda streams: _each(streams, wanted, target, put_back)))


@dead.command()
def drop(  # noqa: PLR0917  # typer reads the signature
    run: Run = None,
    ids: Ids = None,
    config: RunFile = None,
    reason: Reason = None,
    everything: All = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before many are dropped.")] = False,
) -> None:
    """Delete dead letters, payloads included, for ever; the run counts them as dropped. Exit 1 when any was not.

    Examples: `sao dead drop runs/mine ID`, `sao dead drop runs/mine --all --yes`.
    """
    target = _target(run, config, ids)
    wanted = _selection(target, reason, everything)
    if not (target.ids or yes):
        which = "all dead letters" if everything else f"every dead letter whose reason contains {reason!r}"
        typer.confirm(f"Delete {which} of {target.words} for ever?", abort=True)

    async def delete(streams: TrajectoryStreams, letter: DeadLetter) -> str:
        gone = await streams.drop_dead(letter)
        return "" if gone else f"{letter.trajectory_id}: somebody else has requeued or dropped it"

    _report("dropped", _with_streams(target, lambda streams: _each(streams, wanted, target, delete)))


def _selection(target: _Target, reason: str | None, everything: bool) -> Wanted:
    if (bool(target.ids), bool(reason), everything).count(True) != 1:
        refuse("say which, in one way: trajectory ids, --reason TEXT, or --all")
    return with_ids(target.ids) if target.ids else with_reason(reason or "")


async def _each(
    streams: TrajectoryStreams,
    wanted: Wanted,
    target: _Target,
    act: Callable[[TrajectoryStreams, DeadLetter], Awaitable[str]],
) -> _Done:
    """Act on every letter that is wanted, oldest first; `act` gives the problem, or nothing."""
    letters = await find(streams, wanted)
    found = {letter.trajectory_id for letter in letters}
    done = _Done(Counter(), [_missing(target, one) for one in target.ids if one not in found])
    for letter in reversed(letters):
        try:
            problem = await act(streams, letter)
        except StreamError as error:
            done.problems.append(f"stopped at {letter.trajectory_id}: {error}")
            break
        if problem:
            done.problems.append(problem)
        else:
            done.letters[letter.kind] += 1
    return done


def _report(what: str, done: _Done) -> None:
    kinds = f": {by_kind(done.letters)}" if done.letters else ""
    typer.echo(f"{what} {done.letters.total()}{kinds}")
    for problem in done.problems:
        typer.echo(problem, err=True)
    if done.problems:
        raise typer.Exit(1)


def _missing(target: _Target, trajectory_id: str) -> str:
    return f"{trajectory_id}: no dead letter of this run; `sao dead list {target.words}` shows those there are"


def _target(run: str | None, config: Path | None, ids: list[str] | None) -> _Target:
    """The run that the arguments name; with --config, what stands in RUN's place is an id."""
    if config is not None:
        return _Target(
            find_run(config).config, f"--config {shlex.quote(str(config))}", [*([run] if run else []), *(ids or [])]
        )
    if run is None:
        refuse("which run? Name its folder, or a run file with --config")
    return _Target(find_run(Path(run)).config, shlex.quote(run), list(ids or []))


def _with_streams(target: _Target, work: Callable[[TrajectoryStreams], Awaitable[T]]) -> T:
    """What `work` gives; says what to do and exits with 1 when the store cannot be reached."""

    async def connected() -> T:
        streams = trajectory_streams.connect(target.config)
        try:
            return await work(streams)
        finally:
            await streams.close()

    try:
        return asyncio.run(connected())
    except StreamError as error:
        typer.echo(f"{error}", err=True)
        typer.echo(
            "Dead letters lie in the run's store. `sao up --run-dir RUN` starts that of a local run again; a password "
            "comes from the environment: SAO__REDIS__URL=redis://:PASSWORD@host:port/0",
            err=True,
        )
        raise typer.Exit(1) from None
