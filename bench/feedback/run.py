"""Answer trajectories of a running `sao up` late, and account for every trajectory afterwards."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import redis

from sao.accepted import accepted
from sao.config import RunConfig
from sao.rows import UpdateRow, read_rows
from services.trainer.drops import read_drops
from tests.chaos.audit import Evidence, audit
from tests.chaos.evidence import gather
from tests.support.valkey import valkey

LATE_S, ANSWERS, EXPIRED = 180.0, 50, 20
"""How late they come, how many are given, and how many that nobody answers must have expired before the end."""
DEADLINE_S = 240.0
WINDOW_S = 30.0
SLOWEST, LONGEST_GAP_S = 0.5, 15.0
"""Of a window's updates against the median window, and between two updates."""
SETTINGS = (
    "reward.feedback.share=0.2",
    "reward.feedback.unasked=0.5",
    f"reward.feedback.deadline_s={DEADLINE_S}",
    'preference.name="cute-and-liked"',
    "preference.weights.style_cute=0.5",
    "preference.weights.style_chuunibyou=-0.5",
    "preference.weights.style_classical=-0.5",
    "preference.weights.feedback=0.2",
    "preference.offset=0.4",
    'preference.gates=["quality"]',
)
"""One in five is asked for; feedback is worth a tenth more or less than none."""


@dataclass
class Answers:
    """What was seen and said while the run went on."""

    late_s: dict[str, float] = field(default_factory=dict)
    """Seconds between parking and answer, by trajectory."""
    states: Counter[str] = field(default_factory=Counter)
    waiting_peak: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


class Person:
    """Answers the first trajectories that began to wait after the policy began to move, each LATE_S later."""

    def __init__(self, config: RunConfig, run: Path) -> None:
        self._url = f"http://127.0.0.1:{config.reward.port}"
        self._run = run
        self._since: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self.answers = Answers()

    def look(self, client: httpx.Client) -> bool:
        """Note who waits, answer who is due; whether all is answered and dealt with, and others have expired."""
        found = client.get(f"{self._url}/v1/feedback", params={"limit": 100}).raise_for_status().json()
        self.answers.waiting_peak = max(self.answers.waiting_peak, found["waiting"])
        began_s = next((row.finished_s for row in policy_rows(self._run / "updates.jsonl")), None)
        for one in found["trajectories"]:
            self._since[one["trajectory"]] = one["since_s"]
            if began_s is not None and one["since_s"] >= began_s and len(self._due) < ANSWERS:
                self._due.setdefault(one["trajectory"], one["since_s"])
        for trajectory, since_s in self._due.items():
            if trajectory not in self.answers.late_s and time.time() - since_s >= LATE_S:
                self._answer(client, trajectory, since_s)
        never = [since_s for one, since_s in self._since.items() if one not in self._due]
        expired = sum(time.time() - since_s > DEADLINE_S + 2 for since_s in never)
        return len(self.answers.late_s) == ANSWERS and expired >= EXPIRED and self.answers.late_s.keys() <= self._past()

    def _past(self) -> set[str]:
        """Ids that the trainer has done with."""
        trained = {one.id for row, _ in read_rows(self._run / "updates.jsonl") for one in row.trajectories}
        return trained | {drop.trajectory for drop in read_drops(self._run / "dropped.jsonl")}

    def _answer(self, client: httpx.Client, trajectory: str, since_s: float) -> None:
        said = {"trajectory": trajectory, "value": float(len(self.answers.late_s) % 2)}
        answer = client.post(f"{self._url}/v1/feedback", json=said, params={"author": "make prove-feedback"})
        self.answers.states[answer.raise_for_status().json()["state"]] += 1
        self.answers.last_s = time.time()
        self.answers.first_s = self.answers.first_s or self.answers.last_s
        self.answers.late_s[trajectory] = self.answers.last_s - since_s


def answer_late(config: RunConfig, run: Path, running: Callable[[], bool], timeout_s: float = 1500) -> Answers:
    """Until all is answered, and enough others have expired; RuntimeError when the run ends before that."""
    person = Person(config, run)
    deadline = time.monotonic() + timeout_s
    with httpx.Client(timeout=10) as client:
        while not person.look(client):
            if not running() or time.monotonic() > deadline:
                msg = f"the run ended, or {timeout_s:.0f} s passed, after {len(person.answers.late_s)} answers"
                raise RuntimeError(msg)
            time.sleep(0.5)
    return person.answers


def policy_rows(rows_file: Path) -> list[UpdateRow]:
    """The updates that moved the policy."""
    return [row for row, _ in read_rows(rows_file) if not row.critic_only]


def judge(config: RunConfig, run: Path, answers: Answers) -> dict[str, Any]:
    """What became of everything, once the run has been stopped in good order."""
    with (run / "acknowledged.jsonl").open("w") as file:
        for trajectory, _ in accepted(run):
            file.write(json.dumps({"trajectory": trajectory, "status": "accepted"}) + "\n")
    with valkey(run / "valkey") as url, redis.Redis.from_url(url) as client:
        evidence = gather(run, config.run.name, client)
    verdict = audit(evidence)
    fates = fates_of(list(answers.late_s), evidence)
    expired = sum(reason.startswith("timeout: feedback") for reason in evidence.dead.values())
    pace = pace_of([row.finished_s for row in policy_rows(run / "updates.jsonl")], answers.last_s)
    typed = sum(fates.values()) == ANSWERS and set(fates) <= {"trained", "dropped: stale", "dead: timeout"}
    steady = pace["slowest_of_median"] >= SLOWEST and pace["longest_gap_s"] <= LONGEST_GAP_S
    return {
        "passed": typed and steady and verdict.passed and expired >= EXPIRED and set(answers.states) == {"joined"},
        "answers": dict(answers.states),
        "seconds_late": [round(min(answers.late_s.values()), 1), round(max(answers.late_s.values()), 1)],
        "answered_became": fates,
        "never_answered_expired": expired,
        "accepted": verdict.acknowledged,
        "became": dict(verdict.fates),
        "dropped": dict(verdict.dropped_by_reason),
        "dead": dict(verdict.dead_by_reason),
        "lost": list(verdict.lost),
        "twice": list(verdict.twice),
        "waiting_peak": answers.waiting_peak,
        "admission_limit": config.admission_limit,
        **pace,
    }


def fates_of(trajectories: Sequence[str], evidence: Evidence) -> Mapping[str, int]:
    """How many of these were trained, dropped, dead, and why; `nothing` is what no other word fits."""
    trained = set(evidence.trained)

    def fate(one: str) -> str:
        if one in trained:
            return "trained"
        if one in evidence.dropped:
            return f"dropped: {evidence.dropped[one]}"
        if one in evidence.dead:
            return f"dead: {evidence.dead[one].partition(':')[0]}"
        return "waiting" if one in evidence.waiting else "nothing"

    return dict(Counter(map(fate, trajectories)))


def pace_of(finished_s: Sequence[float], until_s: float) -> dict[str, Any]:
    """Updates in each whole window up to a moment, and the longest time between two of them."""
    times = [at_s for at_s in finished_s if at_s <= until_s]
    windows = int((until_s - times[0]) // WINDOW_S)
    counts = [sum(n <= (at_s - times[0]) / WINDOW_S < n + 1 for at_s in times) for n in range(windows)]
    return {
        "updates_per_window": counts,
        "slowest_of_median": round(min(counts) / statistics.median(counts), 2),
        "longest_gap_s": round(max(after - before for before, after in pairwise(times)), 2),
    }
