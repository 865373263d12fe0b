"""Two ways to show a run: a live view on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sao.supervisor.plot import plot
from sao.supervisor.status import Status, notices, summary

PLAIN_EVERY_S = 5.0
DRAW_EVERY_S = 0.5
EVENTS_SHOWN = 6
PLOT_HEIGHT = 7
ROOM_BESIDE_PROCESSES = 35
"""Lines that all but the rows of processes take at most; the end of a view too high for the terminal is cut off."""


class View(Protocol):
    """What `sao up` talks to."""

    def tell(self, process: str, event: str) -> None:
        """Something happened."""

    def show(self, status: Status, command: str) -> None:
        """Show how things stand; called often, draws as often as it likes. `command` switches the preference."""

    def close(self) -> None:
        """Leave the terminal as it was; a second call does nothing."""

    def say(self, text: str) -> None:
        """A line that stays, after `close`."""


def view_for_terminal() -> View:
    """The live view when standard output is a terminal, else plain lines."""
    console = Console()
    return LiveView(console) if console.is_terminal else PlainLines()


class PlainLines:
    """One line for each event, and one every few seconds while training."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._next = 0.0
        self._command_shown = False

    def tell(self, process: str, event: str) -> None:
        self._print(f"{process}: {event}")

    def show(self, status: Status, command: str) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        coming = [f"{line.name} {line.state}" for line in status.lines if line.state in {"waiting", "starting"}]
        if status.warm_start is not None:
            step, steps, loss = status.warm_start
            self._print(f"warm-start: step {step} of {steps}, loss {loss:.3f}")
        elif coming:
            self._print(f"waiting for {', '.join(coming)}")
        elif status.progress.last is None:
            engines = [f"{line.name} {line.note}" for line in status.lines if line.name.startswith("engine")]
            self._print(f"waiting for the first update ({', '.join(engines) or 'no engine of ours'})")
        else:
            if not self._command_shown:
                self._print(f"watch and steer it in a browser: {status.console}")
                self._print(f"switch the preference while it trains: {command}")
                self._command_shown = True
            self._print("  ".join(f"{name} {value}" for name, value in summary(status.progress)))
            for notice in notices(status.progress):
                self._print(notice)
        for line in status.storage:
            self._print(line)
        self._next = now + PLAIN_EVERY_S

    def close(self) -> None:
        return

    def say(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - self._start:6.1f} s] {text}\n")
        sys.stdout.flush()


class LiveView:
    """Curve, figures, processes, last events and the next thing to try, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._next = 0.0
        # No refresh thread: children may only be started by a process whose one thread lives on.
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()
        self._start = time.monotonic()

    def tell(self, process: str, event: str) -> None:
        self._events.append(f"{time.monotonic() - self._start:6.0f} s  {process}: {event}")
        self._next = 0.0

    def show(self, status: Status, command: str) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + DRAW_EVERY_S
        self._live.update(self._drawn(status, command), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _drawn(self, status: Status, command: str) -> RenderableType:
        storage_rows = sum(-(-len(line) // self._console.width) for line in status.storage)
        low = self._console.height < ROOM_BESIDE_PROCESSES + len(status.lines) + storage_rows
        # Where there is no room for both, what stops the run comes before the curve.
        parts: list[RenderableType] = [] if low and storage_rows else [self._curve(status)]
        if status.warm_start is not None:
            step, steps, loss = status.warm_start
            parts += [
                Text(f"teaching the tiny model its task's language: {step} of {steps}, loss {loss:.2f}"),
                ProgressBar(total=steps, completed=step, width=60),
            ]
        parts.append(_figures(status))
        parts += [Text(notice, style="yellow") for notice in (*notices(status.progress), *status.storage)]
        parts.append(_processes_in_short(status) if low else _processes(status))
        if self._events and not low:
            parts.append(Text("\n".join(self._events), style="dim", no_wrap=True, overflow="ellipsis"))
        # Broken here with backslashes: where the terminal would wrap it, a copy would not be one command.
        copied = command.replace(" -H ", " \\\n  -H ").replace(" -d ", " \\\n  -d ")
        parts.append(Text.assemble(("Watch and steer it in a browser: ", "bold"), (status.console, "cyan")))
        parts.append(Text.assemble(("Switch what is rewarded, now:\n", "bold"), (copied, "cyan")))
        parts.append(Text("Ctrl-C stops everything and says how to go on.", style="dim"))
        return Group(*parts)

    def _curve(self, status: Status) -> RenderableType:
        values = status.progress.averages
        low, high = min([0.0, *values]), max([1.0, *values])
        width = max(20, min(self._console.width - 14, 120))
        rows = plot(values, width, PLOT_HEIGHT, low, high)
        text = Text()
        for number, row in enumerate(rows):
            label = f"{high - (high - low) * number / PLOT_HEIGHT:6.2f} "
            text.append(label, style="dim")
            text.append(row + "\n", style="green")
        return Panel(text, title=f"reward, mean of the last 100 · {status.elapsed_s:.0f} s", height=PLOT_HEIGHT + 3)


def _figures(status: Status) -> Table:
    table = Table.grid(padding=(0, 3))
    cells = [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in summary(status.progress)]
    for start in range(0, len(cells), 5):
        table.add_row(*cells[start : start + 5])
    return table


def _processes_in_short(status: Status) -> Text:
    """One line: who is not ready yet, else what the engines serve."""
    unready = [f"{line.name} {line.state}" for line in status.lines if line.state != "ready"]
    noted = [f"{line.name} {line.note}" for line in status.lines if line.note]
    ready = f"{len(status.lines) - len(unready)} of {len(status.lines)} processes ready"
    return Text("; ".join([ready, *(unready or noted)]), style="dim")


def _processes(status: Status) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("process", "state", "listens on", ""):
        table.add_column(title, no_wrap=True)
    colours = {"ready": "green", "starting": "yellow", "restarting": "red"}
    for line in status.lines:
        table.add_row(line.name, Text(line.state, style=colours.get(line.state, "dim")), line.address, line.note)
    return table
