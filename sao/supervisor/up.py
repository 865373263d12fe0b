"""`sao up`: one run on one machine, from its settings to its report."""

from __future__ import annotations

import errno
import json
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from sao.config import ConfigError, RunConfig, dump_run_config, load_run_config
from sao.report import adaptation_lines, write_report
from sao.routing import expected_routing
from sao.supervisor import initial_model
from sao.supervisor.board_view import BoardView
from sao.supervisor.engine import NoEngineEnvironmentError, engine_python
from sao.supervisor.folder import RunFolder, RunIsRunningError
from sao.supervisor.plan import owns_engines, plan, with_ports
from sao.supervisor.ports import NoFreePortError, PortChooser
from sao.supervisor.supervisor import Supervisor
from sao.supervisor.tracked import GaveUpError
from sao.supervisor.valkey import NoValkeyError
from sao.supervisor.views import View
from sao.supervisor.watch import StoppedError, Watch
from sao.telemetry.traces import refuse_without_the_extra

IDENTITY = ("run.name", "run.seed", "task.name", "model", "warm_start", "trainer.algorithm", "group")
"""What makes a run the run it is: a resume may not change it."""

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
"""What a write to the run folder meets; the system names no file then."""

TRACEBACK_LINES = 7
"""Of a failed process's traceback; the log has the rest."""

StartError = (
    NoEngineEnvironmentError,
    NoFreePortError,
    NoValkeyError,
    RunIsRunningError,
    initial_model.NoInitialModelError,
)


def up(asked: RunConfig, view: View) -> int:
    """Run until the trainer has finished, a signal comes, or something cannot be mended; the exit status.

    0 finished, 1 failed, 128 + its number after a signal. Raises ConfigError for a setting that cannot be.
    """
    refuse_without_the_extra(asked)
    folder = RunFolder(asked.run.dir.expanduser().resolve())
    try:
        with _signals() as pending, folder.locked():
            return _run(asked, folder, view, pending)
    except StartError as error:
        view.close()
        view.say(f"cannot start: {error}")
        return 1
    except OSError as error:
        if error.filename is None and error.errno not in DISK_ERRORS:
            raise
        view.close()
        view.say(f"failed: {error.filename or folder.root}: {error.strerror}")
        return 1
    finally:
        view.close()


def resume_command(root: Path) -> str:
    """The command that goes on where a run folder ends; it works in the shell that started this one."""
    return f"{shlex.quote(_program())} up --run-dir {shlex.quote(str(root))}"


def _program() -> str:
    """`sao`, or how it was called where PATH does not have it, as under `make run`."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "sao" and shutil.which("sao") is None else "sao"


def refuse_another_run(asked: RunConfig, folder: RunFolder) -> None:
    """ConfigError with the key when the folder holds a run that is another one than was asked for."""
    if not folder.holds_a_run:
        return
    held = load_run_config(folder.asked_file, env={})
    for key in IDENTITY:
        before, now = _value(held, key), _value(asked, key)
        if before != now:
            raise ConfigError(key, f"{folder.root} holds a run with {before}, found {now}: name another --run-dir")


def refuse_missing_files(config: RunConfig, model: Path, *, there: bool) -> None:
    """ConfigError with the key of a file that the run needs and does not find."""
    if config.model.path is not None and not there:
        raise ConfigError(key="model.path", message=f"no checkpoint: {model} holds no config.json")
    prompts = config.task.prompts
    if prompts is not None and not prompts.is_file():
        raise ConfigError(key="task.prompts", message=f"no such file: {prompts}")


def _run(asked: RunConfig, folder: RunFolder, view: View, pending: list[signal.Signals]) -> int:
    refuse_another_run(asked, folder)
    resumed = folder.holds_a_run
    config = with_ports(asked, PortChooser())
    own_engines = owns_engines(asked)
    if own_engines:
        engine_python(config.engine.environment)  # before anything is written
    folder.run_file.write_text(dump_run_config(config), encoding="utf-8")
    model, there = initial_model.locate(folder.run_file)
    refuse_missing_files(config, model, there=there)
    expected_routing(config)  # refuses a model without a router
    # Not before the task and the model were found: a folder that holds a run takes no other name for them.
    folder.asked_file.write_text(dump_run_config(asked), encoding="utf-8")
    earlier_starts = sum(event.event == "up" for event in folder.timeline())
    folder.note("up", detail="resumed" if resumed else "new")
    what = f"{config.task.name}, seed {config.run.seed}, in {folder.root}"
    view.tell("sao", f"{'resuming' if resumed else 'starting'} {what}")
    supervisor = Supervisor(
        plan(config, folder.run_file, model, own_engines=own_engines, earlier_starts=earlier_starts),
        folder,
        view.tell,
        warm_start=None if there else initial_model.warm_start_command(folder.run_file, folder.log_file("warm-start")),
        start_timeout_s=config.engine.start_timeout_s,
    )
    board = BoardView(config)
    code, end = 1, "an error in sao itself"
    try:
        Watch(supervisor, config, folder, board, view).until_finished(pending)
        code, end = 0, "finished"
    except StoppedError as stop:
        code, end = 128 + stop.number, f"stopped by {stop.number.name}"
    except GaveUpError as error:
        end = f"failed: {error}"
        _show_tail(error, folder, view)
    finally:
        began = time.monotonic()
        left = supervisor.stop()
        took_s = time.monotonic() - began
        folder.note("stopped", detail=end)
        board.close()
        view.close()
    view.say(f"{end}; every process ended after {took_s:.1f} s" + (f", except {left}" if left else ""))
    _finish(config, folder, view, finished=code == 0)
    return code


@contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Signals that ask for the end, as a list that grows; handlers are put back afterwards."""
    pending: list[signal.Signals] = []

    def note(number: int, _frame: FrameType | None) -> None:
        pending.append(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield pending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_tail(error: GaveUpError, folder: RunFolder, view: View) -> None:
    view.close()
    view.say(f"the last lines of {folder.log_file(error.name)}:")
    for line in error.tail:
        for part in readable(line):
            view.say(f"  {part}")


def readable(line: str) -> list[str]:
    """A log line for a person: the end of a traceback inside a structured one on lines of its own."""
    try:
        fields = json.loads(line)
    except ValueError:
        return [line]
    exception = fields.get("exception") if isinstance(fields, dict) else None
    if not isinstance(exception, str):
        return [line]
    return [f"{fields.get('time')} {fields.get('event')}:", *exception.strip().splitlines()[-TRACEBACK_LINES:]]


def _finish(config: RunConfig, folder: RunFolder, view: View, *, finished: bool) -> None:
    """Report, and how to go on."""
    report = write_report(folder.root)
    if report is None:
        view.say("no trajectory was trained on, so there is no report")
    else:
        average = report.reward.last_100
        reward = f", mean reward of the last 100: {average:.3f}" if average is not None else ""
        view.say(f"{report.updates} updates, {report.trajectories} trajectories{reward}")
        for line in adaptation_lines(report):
            view.say(line)
        for reason in report.held:
            view.say(f"publishing held, the last weights are not served: {reason} (docs/algorithm.md, Guards)")
        view.say(f"report: {folder.report_file}")
        if folder.curves_file.exists():
            view.say(f"curves: {folder.curves_file}")
    if not finished:
        view.say(f"go on with: {resume_command(folder.root)}")
    elif config.run.updates is not None:
        view.say(f"more of it: {resume_command(folder.root)} --updates {2 * config.run.updates}")


def _value(config: RunConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
