"""What a replay found, as tables for people and as one JSON object for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.trainer.replay.compare import PER_STEP, PER_TOKEN, Divergence, Number, Quantity
from services.trainer.replay.history import spans

TABLES = 3
"""With more updates than this, each gets one line instead of a table."""
SHOWN = ("lag", "reward", "copies", *PER_TOKEN, *PER_STEP)
"""Quantities with a row of their own; the others share one while they agree."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class ReplayedUpdate(_Part):
    """One step that was made again."""

    update: int
    critic_only: int
    """Steps of the critic alone (pre-training, warm-up) made by then."""
    trainer_epoch: int
    origin: str
    """The state that its stretch began from."""
    wanted: bool
    """Asked for, or only on the way there."""
    trajectories: int
    action_tokens: int
    quantities: list[Quantity]
    divergence: Divergence | None

    @property
    def name(self) -> str:
        return f"update {self.update}" + (f", critic-only {self.critic_only}" if self.update == 0 else "")


class ReplayReport(_Part):
    """One call of `sao replay`."""

    run: str
    relative: float
    absolute: float
    wanted: list[int]
    updates: list[ReplayedUpdate]
    """Every step made again, in order; the last one has diverged, or none has."""
    reproduced: bool
    divergence: Divergence | None
    not_reached: list[int]
    """Asked for, and after the first divergence."""


def show(report: ReplayReport, console: Console) -> None:
    """Print the report."""
    asked = [update for update in report.updates if update.wanted]
    for update in asked if len(asked) <= TABLES else []:
        console.print(_table(update))
    if len(asked) > TABLES:
        console.print(_lines(asked))
    last = report.updates[-1]
    if report.divergence is not None and (not last.wanted or len(asked) > TABLES):
        console.print(_table(last))
    console.print(_verdict(report), soft_wrap=True)


def _table(update: ReplayedUpdate) -> Table:
    size = f"{update.trajectories} trajectories, {update.action_tokens} action tokens"
    title = f"{update.name}, from {update.origin}: {size}"
    table = Table("quantity", "logged", "replayed", "difference", "", title=title, title_justify="left")
    others = [row for row in update.quantities if row.quantity not in SHOWN]
    for row in [row for row in update.quantities if row.quantity in SHOWN or not row.ok]:
        ok = Text("ok") if row.ok else Text(f"{row.differing}/{row.compared}", style="bold red")
        table.add_row(row.quantity, _number(row.logged), _number(row.replayed), f"{row.largest_difference:.3g}", ok)
    agreeing = [row for row in others if row.ok]
    if agreeing:
        largest = max(row.largest_difference for row in agreeing)
        table.add_row(f"{len(agreeing)} other metrics", "", "", f"{largest:.3g}", "ok")
    return table


def _lines(updates: Sequence[ReplayedUpdate]) -> Table:
    table = Table("update", "from", "trajectories", "largest difference", "")
    for update in updates:
        worst = max(update.quantities, key=lambda row: row.largest_difference)
        difference = f"{worst.largest_difference:.3g}" + (f" {worst.quantity}" if worst.largest_difference > 0 else "")
        ok = Text("ok") if update.divergence is None else Text("diverged", style="bold red")
        table.add_row(update.name.removeprefix("update "), update.origin, str(update.trajectories), difference, ok)
    return table


def _verdict(report: ReplayReport) -> Text:
    made = f"{len(report.updates)} steps re-applied, tolerance {report.relative:g} (absolute {report.absolute:g})"
    found = report.divergence
    if found is None:
        return Text.assemble(("reproduced", "bold green"), f": update {spans(report.wanted)}; {made}")
    place = f"trajectory {found.trajectory}, " if found.trajectory else ""
    token = f", token {found.token}" if found.token is not None else ""
    where = f"{report.updates[-1].name}: {place}{found.quantity}{token}"
    values = f"logged {_number(found.logged)}, replayed {_number(found.replayed)}"
    rest = f"; not reached: {spans(report.not_reached)}" if report.not_reached else ""
    return Text.assemble(("diverged", "bold red"), f" first at {where}: {values}\n  {found.meaning}\n  {made}{rest}")


def _number(value: Number) -> str:
    if value is None:
        return "absent"
    if isinstance(value, str):
        return value
    return f"{value:.9g}" if math.isfinite(value) else str(value)
