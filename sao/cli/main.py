"""The `sao` command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sao.cli.check import check
from sao.cli.dead import dead
from sao.cli.doctor import doctor
from sao.cli.forget import forget
from sao.cli.prefer import prefer
from sao.cli.replay import replay
from sao.cli.score import score
from sao.cli.trajectories import trajectories
from sao.cli.weights import weights
from sao.config import ConfigError, RunConfig, load_run_config
from sao.config.doubts import doubts

app = typer.Typer(
    name="sao",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Teach a language model from one rollout at a time, while it is used.

    Start here: **sao up --preset tiny** runs the whole system on this machine. Then **sao up --preset tiny-writing**:
    switch what is rewarded in a browser, at the address it shows, or with **sao prefer** in another terminal, and watch
    the reward fall and recover.""",
)
app.command("check")(check)
app.command("doctor")(doctor)
app.command("forget")(forget)
app.command("prefer")(prefer)
app.command("replay")(replay)
app.command("score")(score)
app.add_typer(dead, name="dead")
app.add_typer(trajectories, name="trajectories")
app.add_typer(weights, name="weights")

RunDir = Annotated[Path | None, typer.Option("--run-dir", help="The run's folder; one that holds a run is resumed.")]
Folder = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a run file.")]


@app.command()
def up(  # noqa: PLR0917  # typer reads the signature
    run_file: Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="The run file.")] = None,
    preset: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="A preset's name, or a run file.")] = None,
    seed: Annotated[int | None, typer.Option(help="run.seed: warm start, prompts and engines follow from it.")] = None,
    updates: Annotated[int | None, typer.Option(help="run.updates: policy updates after which the run ends.")] = None,
    run_dir: RunDir = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c", help="Any setting; repeatable.")] = None,
    engines: Annotated[int | None, typer.Option(help="engine.count: SGLang engines to start.")] = None,
) -> None:
    """Run everything on this machine: Valkey, SGLang, ingest, worker, reward, trainer, weights.

    Ends by itself after the updates asked for (exit 0), with report.json and curves.png in the run's folder. Ctrl-C
    ends every process and says how to go on; the same --run-dir resumes. Exit 1: failed; 2: a setting is wrong.

    Examples: `sao up --preset tiny --seed 1 --updates 200 --run-dir runs/one`,
    `sao up --preset tiny --set trainer.trajectories_per_update=1`, `sao up --run-dir runs/one` (resume).
    """
    from sao.supervisor.up import up as run_up
    from sao.supervisor.views import view_for_terminal

    given = list(sets or [])
    for key, value in (("run.seed", seed), ("run.updates", updates), ("engine.count", engines)):
        if value is not None:
            given.append(f"{key}={value}")
    if run_dir is not None:
        given.append(f"run.dir={run_dir}")
    try:
        config = asked_config(run_file, preset, given, run_dir)
        for doubt in doubts(config):
            typer.echo(f"warning {doubt.key}: {doubt.text}", err=True)
        code = run_up(config, view_for_terminal())
    except ConfigError as error:
        typer.echo(f"configuration error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


def asked_config(run_file: Path | None, preset: str | None, sets: Sequence[str], run_dir: Path | None) -> RunConfig:
    """What the command line asks for; with a run folder and nothing else, what that run was asked for before."""
    if preset is not None and (preset.endswith(".toml") or "/" in preset):
        if run_file is not None:
            raise ConfigError(key="preset", message=f"two run files: {run_file} and {preset}; name one")
        run_file, preset = Path(preset), None
    if run_file is None and preset is None:
        held = run_dir / "asked.toml" if run_dir is not None else None
        if held is None or not held.exists():
            where = f"{run_dir} holds no run" if run_dir is not None else "nothing to run"
            raise ConfigError(
                key="preset", message=f"{where}: give --preset tiny, a run file, or the --run-dir of a run"
            )
        run_file = held
    return load_run_config(run_file, sets, preset=preset)


@app.command()
def status(folder: Folder) -> None:
    """Say what a run is doing: its processes, how far it has come, how well it does. Exit 1 when nothing runs.

    Given a run file, as in a pod, it asks the store and reads the run's folder: exit 1 when the store does not answer.

    Examples: `sao status runs/mine`, `sao status /etc/sao/run.toml`.
    """
    from sao.cli.status import print_status

    raise typer.Exit(0 if print_status(folder) else 1)


@app.command()
def report(folder: Folder) -> None:
    """Write report.json and curves.png of a run, finished or not, and print the summary."""
    from sao.cli.status import print_report

    raise typer.Exit(0 if print_report(folder) else 1)


def run() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    run()
