"""Everything a person at the terminal is shown, gathered once and drawn by whichever view there is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sao.board.base import EngineFacts
from sao.config import RunConfig
from sao.curves import explained_variance, rejected_share
from sao.preference import Preference, PreferenceDocument
from sao.supervisor.progress import Progress
from sao.supervisor.supervisor import Supervisor
from sao.tasks import load_task


@dataclass(frozen=True, slots=True)
class Line:
    """One process in the table."""

    name: str
    state: str
    address: str
    note: str


@dataclass(frozen=True, slots=True)
class Status:
    """One moment of a run."""

    elapsed_s: float
    lines: Sequence[Line]
    progress: Progress
    warm_start: tuple[int, int, float] | None
    """Step, steps, loss while the tiny model is being taught."""
    preference: Preference | None
    storage: Sequence[str] = ()
    """What held.py tells of weights, and storage.py of store and spools."""
    console: str = ""
    """Where the reward service shows the run to people."""


def lines_of(supervisor: Supervisor, engines: dict[str, EngineFacts]) -> list[Line]:
    """The table of processes; engines with the version that they serve."""
    result = []
    for one in supervisor.tracked:
        facts = engines.get(one.name)
        notes = [one.trouble, f"started {one.starts} times" if one.starts > 1 else ""]
        if facts is not None:
            notes = [facts.state.value, facts.version, facts.error, *notes]
        result.append(Line(one.name, one.state.value, one.service.address, " ".join(filter(None, notes))))
    return result


def summary(progress: Progress) -> list[tuple[str, str]]:
    """Names and values of the figures under the curve."""
    last = progress.last
    values = [
        ("update", f"{progress.update}"),
        ("trajectories", f"{progress.trajectories}"),
        ("reward, last 100", _shown(progress.average, ".3f")),
        ("version", progress.version or "-"),
        ("lag", _shown(progress.lag, ".1f")),
        ("tokens/s", _shown(progress.tokens_per_s, ".0f")),
        ("rejected", _percent(rejected_share(last) if last is not None else None)),
        ("explained variance", _shown(explained_variance(last) if last is not None else None, ".2f")),
        ("entropy", _shown(last.metrics.get("entropy") if last is not None else None, ".2f")),
        ("dropped", f"{progress.dropped}"),
    ]
    return [(name, value) for name, value in values if value]


def notices(progress: Progress) -> list[str]:
    """What explains a run that seems to stand still: the critic trains alone, or publishing is held, and why."""
    last = progress.last
    if last is None:
        return []
    phase = [f"{last.phase}; the policy waits for it"] if last.phase else []
    serving = progress.version or "the version before"
    then = "training stops when its rollouts are too old; what to do: docs/algorithm.md, Guards, and logs/trainer.log"
    held = [f"PUBLISHING HELD, engines stay on {serving}: {reason} ({then})" for reason in last.held]
    return phase + held


def other_preference(config: RunConfig, current: Preference | None) -> PreferenceDocument:
    """A preference to try next: another one of the task's, or the present one at half its worth."""
    task = load_task(config.task.name)
    present = current.document if current is not None else config.preference or task.default_preference
    offered: dict[str, PreferenceDocument] = dict(getattr(task, "preferences", {}))
    documents = list(offered.values())
    names = [document.name for document in documents]
    if present.name in names and len(documents) > 1:
        return documents[(names.index(present.name) + 1) % len(documents)]
    others = [document for document in documents if document.name != present.name]
    if others:
        return others[0]
    halved = {name: weight / 2 for name, weight in present.weights.items()}
    return present.model_copy(update={"name": f"{present.name}-halved"[:64], "weights": halved})


def switch_command(config: RunConfig, current: Preference | None) -> str:
    """The exact command that switches the preference of the running system."""
    body = json.dumps(other_preference(config, current).model_dump(exclude_defaults=True), ensure_ascii=False)
    token = " -H 'Authorization: Bearer '\"$SAO__AUTH__TOKEN\"" if config.auth.token else ""
    quoted = body.replace("'", "'\\''")
    return f"curl -X PUT {_reward_url(config)}/v1/preferences{token} -H 'Content-Type: application/json' -d '{quoted}'"


def console_url(config: RunConfig) -> str:
    """Where a browser finds the console."""
    return f"{_reward_url(config)}/console"


def _reward_url(config: RunConfig) -> str:
    host = "127.0.0.1" if config.reward.bind in {"0.0.0.0", "::"} else config.reward.bind  # noqa: S104  # compared
    return f"http://{host}:{config.reward.port}"


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
