"""`sao trajectories`: read what a run trained on, as it trains, and one trajectory token by token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from google.protobuf.message import DecodeError
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sao import streams as trajectory_streams
from sao.archive import ArchiveError
from sao.cli.runs import find_run
from sao.config import RunConfig
from sao.rows import read_rows, read_rows_back
from sao.run_history import RunHistory
from sao.streams.base import StreamError
from sao.supervisor.folder import RunFolder
from sao.tasks import TaskLoadError, load_task
from sao.tasks.tiny_tokenizer import VocabularyError, tokenizer_of_run
from sao.tokenizer import Tokenizer
from sao.trajectory_views import (
    MAX_TOKENS,
    SegmentView,
    TokenView,
    TrajectoryReader,
    TrajectorySummary,
    TrajectoryView,
    place_at,
    summary_of,
    summary_of_entry,
)

POLL_S = 0.5

trajectories = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Read the trajectories of a run: what was written, what it was worth, and what each token carried.

    **tail** shows the newest as they are trained on; **show** opens one. The console of the reward service shows the
    same (`sao up` prints its address). RUN is a run's folder, in a pod its run file; whether the run
    still goes does not matter.""",
)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a run file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")]


@trajectories.command()
def tail(
    run: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones until Ctrl-C.")] = False,
    count: Annotated[int, typer.Option("-n", min=0, max=10_000, help="The newest so many first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show what was trained on last, the newest at the end: update, reward, preference, lag, tokens, components.

    Examples: `sao trajectories tail runs/mine`, `sao trajectories tail runs/mine -f`,
    `sao trajectories tail runs/mine --json -n 1000 | jq .reward`.
    """
    found = find_run(run)
    rows_file = RunFolder(found.root).rows_file
    try:
        offset = next((after for _, _, after in read_rows_back(rows_file)), 0)
        newest = _newest(found.config, found.root, offset, count)
        if not as_json:
            typer.echo(HEADING)
        for summary in newest:
            _print(summary, as_json=as_json)
        if not newest and not follow and not as_json:
            typer.echo("nothing was trained on yet; --follow waits for it")
        while follow:
            for row, after in read_rows(rows_file, offset):
                offset = after
                for one in row.trajectories:
                    _print(summary_of(row, one), as_json=as_json)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    except (OSError, ValidationError) as error:
        _fail(f"{rows_file} cannot be read: {error}")


HEADING = f"{'trajectory':<36}  {'update':>6}  {'reward':>7}  {'under':>5}  {'lag':>3}  {'tokens':>6}  components"


def _newest(config: RunConfig, run: Path, end: int, count: int) -> list[TrajectorySummary]:
    """The newest of the rows before byte `end`, the newest last."""
    if not end or not count:
        return []
    history = RunHistory(RunFolder(run).rows_file)
    while not history.caught_up:
        history.poll()
    reader = TrajectoryReader(run, None, max_lag=config.trainer.max_lag)
    return list(reversed(reader.page(place_at(end), count, history).trajectories))


def _print(summary: TrajectorySummary, *, as_json: bool) -> None:
    typer.echo(summary.model_dump_json() if as_json else line_of(summary))


def line_of(summary: TrajectorySummary) -> str:
    """One line of `tail`."""
    update = "critic" if summary.critic_only else str(summary.update)
    parts = ", ".join(f"{name} {value:.2f}" for name, value in sorted(summary.components.items()))
    return (
        f"{summary.id:<36}  {update:>6}  {summary.reward:>7.3f}  {f'v{summary.trained_under}':>5}  "
        f"{summary.lag:>3}  {summary.tokens:>6}  {parts or '-'}"
    )


@trajectories.command()
def show(
    run: Run,
    trajectory_id: Annotated[str, typer.Argument(metavar="ID", help="As `tail` shows it.")],
    tokens: Annotated[bool, typer.Option("--tokens", help="A line for each token, with all its numbers.")] = False,
    as_json: AsJson = False,
) -> None:
    """Open one trajectory: its text turn by turn, coloured by advantage, its reward and how that came about.

    On a terminal a token is blue where its advantage is positive, orange where it is negative, struck through where it
    carried no gradient. What is not trained on yet is read from the run's store, which must be up for that.

    Examples: `sao trajectories show runs/mine ID`, `sao trajectories show runs/mine ID --tokens`.
    """
    found = find_run(run)
    config = found.config
    reader = TrajectoryReader(found.root, _tokenizer(config), max_lag=config.trainer.max_lag)
    try:
        view = reader.trained(trajectory_id) or _untrained(config, reader, trajectory_id)
    except (OSError, ValidationError, ArchiveError, DecodeError) as error:
        _fail(f"trajectory {trajectory_id} cannot be read: {error}")
    if view is None:
        _fail(
            f"trajectory {trajectory_id} is neither in {found.root} nor in its store; "
            f"`sao trajectories tail {run}` lists some"
        )
    if as_json:
        typer.echo(view.model_dump_json(indent=2))
        return
    console = Console()
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in facts_of(view):
        table.add_row(Text(name, style="bold"), Text(value))
    console.print(table)
    for segment in view.segments:
        console.print(Text(f"\n{_title(segment)}", style="bold"))
        if tokens:
            console.print(_token_table(segment))
        else:
            console.print(_coloured(segment, view.largest_advantage or 1.0), soft_wrap=True)
    if view.token_count > MAX_TOKENS + view.first_token:
        console.print(f"the first {MAX_TOKENS} of {view.token_count} tokens")


def _untrained(config: RunConfig, reader: TrajectoryReader, trajectory_id: str) -> TrajectoryView | None:
    async def ask() -> bytes | None:
        streams = trajectory_streams.connect(config)
        try:
            return await streams.payload(trajectory_id)
        finally:
            await streams.close()

    try:
        payload = asyncio.run(ask())
    except StreamError as error:
        _fail(
            f"trajectory {trajectory_id} was not trained on, and the run's store cannot be asked: {error}; "
            f"`sao up --run-dir RUN` starts that of a local run again"
        )
    if payload is None:
        return None
    summary = summary_of_entry(trajectory_id, {}, "waiting")
    return reader.untrained(
        payload, summary, note="in the run's store, not trained on; `sao dead show` knows dead ones"
    )


def facts_of(view: TrajectoryView) -> Iterator[tuple[str, str]]:
    """Names and values of what is known of the trajectory as a whole."""
    summary = view.summary
    yield "trajectory", summary.id
    yield "state", summary.state
    if summary.reward is not None:
        under = f"preference v{summary.trained_under or summary.scored_under}"
        named = f"{under} {view.preference}" if view.preference else under
        yield "reward", f"{summary.reward:.4f} under {named}, scored under v{summary.scored_under}"
    if summary.components:
        yield "components", ", ".join(f"{name} {value:.4f}" for name, value in sorted(summary.components.items()))
    if summary.update is not None:
        kind = "critic only, at update" if summary.critic_only else "update"
        yield "trained in", f"{kind} {summary.update} of epoch {view.trainer_epoch}, on {view.version_before}"
    if summary.consumed_s is not None:
        taken = datetime.fromtimestamp(summary.consumed_s, UTC)
        yield "taken", f"{taken:%Y-%m-%d %H:%M:%S} UTC, {summary.lag} updates after its oldest token"
    if view.task:
        yield "task", f"{view.task}, prompt {view.prompt_id or '-'}, ordinal {summary.ordinal}, sample {view.sample}"
        yield "sampled by", f"{', '.join(view.versions)} on {view.engine_id or '-'}, worker {view.worker_id or '-'}"
        yield "length", f"{summary.turns} turns, {view.token_count} tokens, ended by {summary.finish_reason}"
        yield "payload", view.payload
    if view.note:
        yield "note", view.note


def _title(segment: SegmentView) -> str:
    return "prompt" if segment.kind == "prompt" else f"turn {segment.turn}, {segment.kind}"


def _coloured(segment: SegmentView, largest: float) -> Text:
    """The segment's tokens; between tokens of words a space, as in its text."""
    between = " " if " " in segment.text and not any(" " in token.text for token in segment.tokens) else ""
    text = Text()
    for token in segment.tokens:
        text.append(token.text, style=_style(token, largest))
        text.append(between)
    return text


def _style(token: TokenView, largest: float) -> str:
    if token.version is None:
        return "dim italic"
    struck = " strike" if token.masked else ""
    share = min(abs(token.advantage or 0.0) / largest, 1.0)
    if token.advantage is None or share < 0.05:
        return f"default{struck}"
    low, high = ((120, 135, 170), (47, 111, 224)) if token.advantage > 0 else ((170, 140, 120), (224, 123, 31))
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return f"rgb({red},{green},{blue}){struck}"


def _token_table(segment: SegmentView) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # fits 80 columns: a cut number says nothing
    names = ("value", "advantage", "ratio", "weight")
    for name in ("token", "text", "version", "lag", "log-prob", *names, ""):
        table.add_column(name, justify="left" if name in {"text", "version", ""} else "right")
    for token in segment.tokens:
        numbers = [_number(value) for value in (token.logprob, *(getattr(token, name) for name in names))]
        why = "stale" if token.stale else "masked" if token.masked else ""
        lag = "-" if token.lag is None else str(token.lag)
        table.add_row(str(token.position), Text(repr(token.text)), token.version or "-", lag, *numbers, why)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _tokenizer(config: RunConfig) -> Tokenizer | None:
    try:
        return tokenizer_of_run(config.model.path, load_task(config.task.name))
    except (TaskLoadError, VocabularyError):
        return None  # the ids are shown, and the view says so


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)
