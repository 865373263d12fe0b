"""The report of a run: what was learned, how stale, how fast, and what was lost, computed from the run folder.

Everything comes from updates.jsonl, timeline.jsonl, served.jsonl, the preferences and run.toml of the run's folder, so
`sao report` gives the same again at any time.
"""

from __future__ import annotations

import os
import platform
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict

from sao.adaptation import first_served, kept_preferences
from sao.config import RunConfig, dump_run_config
from sao.curves import (
    WINDOW,
    Adaptation,
    CurvePoint,
    PreferenceSwitch,
    adaptations,
    dropped,
    effective_rows,
    first_consumed_s,
    lag_histogram,
    preference_switches,
    reward_curve,
    trained,
)
from sao.rows import UpdateRow, read_rows
from sao.supervisor.folder import RunFolder, TimelineEvent


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RewardSummary(_Part):
    first_100: float | None
    """Mean of the first 100 trajectories; none: there were fewer."""
    last_100: float | None
    best_100: float | None


class LagSummary(_Part):
    """Updates between the trainer and a trajectory's oldest token, at consumption."""

    mean: float
    max: int
    histogram: dict[int, int]


class WallTimes(_Part):
    """Seconds; of the newest start where a run was started several times, none where it did not happen."""

    warm_start_s: float | None
    """Making the initial checkpoint; none: it was cached."""
    engine_start_s: float | None
    """The slowest engine."""
    all_ready_s: float | None
    first_trajectory_s: float | None
    """From `sao up` to the first trajectory the trainer took."""
    first_update_s: float | None
    total_s: float | None
    """From `sao up` to the end of the last process."""
    training_s: float
    """From the first trajectory consumed to the last update, pauses between starts included."""


class Throughput(_Part):
    trajectories_per_s: float
    tokens_per_s: float
    action_tokens_per_s: float
    updates_per_s: float


class PreferenceSummary(_Part):
    switches: list[PreferenceSwitch]
    scored_under: list[int]
    """Preference version of each trajectory, in training order."""
    trained_under: list[int]
    adaptation: list[Adaptation]
    """How the run followed each switch."""


class Machine(_Part):
    system: str
    python: str
    processor: str
    cores: int
    memory_gib: float


class Report(_Part):
    """report.json."""

    sao: str
    written: str
    run: str
    task: str
    seed: int
    trajectories: int
    updates: int
    """Policy updates; critic-only ones are counted in critic_only_updates."""
    critic_only_updates: int
    versions: list[str]
    """Published weight versions, oldest first."""
    held: list[str]
    """Guards that held publishing after the last update: the newest version is then older than the last weights."""
    reward: RewardSummary
    reward_curve: list[CurvePoint]
    lag: LagSummary
    drops: dict[str, int]
    finish_reasons: dict[str, int]
    preference: PreferenceSummary
    wall: WallTimes
    throughput: Throughput
    restarts: dict[str, int]
    """Crashes that were mended, by process."""
    starts: int
    """How often the run was started."""
    last_metrics: dict[str, float]
    """The last update's metrics."""
    machine: Machine
    config: dict[str, Any]
    """The effective configuration, without secrets."""


def make_report(root: Path, config: RunConfig | None = None) -> tuple[Report, list[UpdateRow]] | None:
    """The report of a run folder and the rows behind it; None when nothing was trained on yet.

    `config`: of a run whose folder holds no run file, as in a cluster.
    """
    folder = RunFolder(root)
    written = [row for row, _ in read_rows(folder.rows_file)]
    rows = effective_rows(written)
    pairs = trained(rows)
    if not pairs:
        return None
    effective = folder.run_file.read_text(encoding="utf-8") if config is None else dump_run_config(config)
    settings = tomllib.loads(effective)
    timeline = folder.timeline()
    curve = reward_curve(rows)
    averages = [point.moving_average for point in curve]
    start_s = first_consumed_s(rows)
    span_s = max(rows[-1].finished_s - start_s, 1e-9)
    policy_rows = [row for row in rows if not row.critic_only]
    lags = [trajectory.lag for _, trajectory in pairs]
    report = Report(
        sao=version("sao"),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        run=settings["run"]["name"],
        task=settings["task"]["name"],
        seed=settings["run"]["seed"],
        trajectories=len(pairs),
        updates=rows[-1].update,
        critic_only_updates=len(rows) - len(policy_rows),
        versions=list(dict.fromkeys(row.version for row in written if row.version)),
        held=rows[-1].held,
        reward=RewardSummary(
            first_100=averages[0] if averages else None,
            last_100=averages[-1] if averages else None,
            best_100=max(averages) if averages else None,
        ),
        reward_curve=curve,
        lag=LagSummary(mean=fmean(lags), max=max(lags), histogram=lag_histogram(rows)),
        drops=dropped(written),
        finish_reasons=_counts([trajectory.finish_reason for _, trajectory in pairs]),
        preference=PreferenceSummary(
            switches=preference_switches(rows),
            scored_under=[trajectory.scored_under for _, trajectory in pairs],
            trained_under=[trajectory.trained_under for _, trajectory in pairs],
            adaptation=adaptations(rows, kept_preferences(root), first_served(root)),
        ),
        wall=wall_times(timeline, rows),
        throughput=Throughput(
            trajectories_per_s=len(pairs) / span_s,
            tokens_per_s=sum(trajectory.tokens for _, trajectory in pairs) / span_s,
            action_tokens_per_s=sum(trajectory.action_tokens for _, trajectory in pairs) / span_s,
            updates_per_s=len(rows) / span_s,
        ),
        restarts=_counts([event.process for event in timeline if event.event == "restarted"]),
        starts=sum(event.event == "up" for event in timeline),
        last_metrics=rows[-1].metrics,
        machine=_machine(),
        config=settings,
    )
    return report, rows


def adaptation_lines(report: Report) -> list[str]:
    """How the run followed each switch, a line each."""
    lines = []
    for one in report.preference.adaptation:
        steps = [
            ("scored", one.first_scored_s),
            ("trained", one.first_trained_s),
            ("serving", one.first_served_s),
            ("reward back", one.recovered_s),
        ]
        told = ", ".join(f"{name} {'never' if at is None else f'after {at:.1f} s'}" for name, at in steps)
        updates = f" ({one.recovered_updates} updates)" if one.recovered_updates is not None else ""
        lines.append(f"switch {one.version}, {one.name}: {told}{updates}")
    return lines


def write_report(root: Path, config: RunConfig | None = None) -> Report | None:
    """Write report.json, and curves.png where matplotlib is installed; None when there is nothing to report."""
    made = make_report(root, config)
    if made is None:
        return None
    report, rows = made
    folder = RunFolder(root)
    temporary = folder.report_file.with_suffix(".tmp")
    temporary.write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder.report_file)
    try:
        from sao.plots import draw_curves
    except ModuleNotFoundError:
        return report  # an optional extra: sao[report]
    draw_curves(rows, folder.curves_file, title=f"{report.task}, seed {report.seed}", window=WINDOW)
    return report


def wall_times(timeline: Sequence[TimelineEvent], rows: Sequence[UpdateRow]) -> WallTimes:
    """Durations of the newest start, from its events and the rows written since."""
    last_up = max((i for i, event in enumerate(timeline) if event.event == "up"), default=0)
    events = list(timeline[last_up:])
    up_s = events[0].at_s if events else None
    ended_s = next((event.at_s for event in events if event.event == "stopped"), None)
    consumed = [trajectory.consumed_s for _, trajectory in trained(rows)]
    updated = [row.finished_s for row in rows]

    def since_up(at_s: float | None) -> float | None:
        return None if at_s is None or up_s is None else at_s - up_s

    def first_after(times: Sequence[float]) -> float | None:
        return min((at_s for at_s in times if up_s is not None and at_s >= up_s), default=None)

    engines = [_took(events, name) for name in {event.process for event in events} if name.startswith("engine-")]
    return WallTimes(
        warm_start_s=_took(events, "warm-start"),
        engine_start_s=max((took for took in engines if took is not None), default=None),
        all_ready_s=since_up(next((e.at_s for e in events if e.event == "ready" and not e.process), None)),
        first_trajectory_s=since_up(first_after(consumed)),
        first_update_s=since_up(first_after(updated)),
        total_s=since_up(ended_s),
        training_s=max(updated) - min(consumed) if consumed else 0.0,
    )


def _took(events: Sequence[TimelineEvent], process: str) -> float | None:
    """Seconds between a process's first start and its first readiness."""
    start = next((e.at_s for e in events if e.event == "started" and e.process == process), None)
    ready = next((e.at_s for e in events if e.event == "ready" and e.process == process), None)
    return None if start is None or ready is None else ready - start


def _counts(values: Sequence[str]) -> dict[str, int]:
    return {value: values.count(value) for value in sorted(set(values))}


def _machine() -> Machine:
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
