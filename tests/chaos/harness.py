"""Round after round: inject a fault, heal it, wait until the run has recovered, write down how it went; then audit.

Recovered means that every process answers that it is ready, the store has its trainer, and an update was finished after
that: one that a trainer had in hand when the store was emptied proves nothing. The next fault comes `PAUSE_S` after
that, or after `DEADLINE_S` without it.

    <runs>/chaos/<commit>-seed<N>/      the run folder, and in it
        acknowledged.jsonl              what ingest told the worker, as the proxy between them saw it
        rounds/0001.json ...            one file a round: a harness that was interrupted goes on after the last
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import redis

from sao.streams.base import StreamName
from tests.chaos.audit import Verdict, audit, falls
from tests.chaos.evidence import events, gather, rewards
from tests.chaos.faults import Fault
from tests.chaos.system import System

DEADLINE_S = 45.0
PAUSE_S = 5.0
START_S = 300.0
DRAIN_S = 90.0
REWARD_WINDOW, REWARD_BAR = 200, 0.70

Say = Callable[[str], None]


@dataclass(frozen=True)
class Round:
    """One fault and what came of it."""

    number: int
    fault: str
    kind: str
    done: str
    """What was injected, in words."""
    injected_s: float
    """Unix seconds."""
    recovery_s: float | None
    """From the healing on; none: not within the deadline."""
    waiting_for: list[str]
    """Who was not ready, or did not train, when the time was over."""
    update_before: int
    update_after: int
    ended: list[str]
    """Processes that ended meanwhile, and how."""


@dataclass(frozen=True)
class Outcome:
    """A whole run, judged."""

    rounds: Sequence[Round]
    verdict: Verdict
    drained: bool
    reward: float
    versions_back: list[tuple[str, str]]
    left: list[int]
    """Processes that outlived the end."""
    blind: list[str]
    """Errors of the proxies: the ledger may have holes."""

    @property
    def passed(self) -> bool:
        """Whether every promise was kept."""
        emptied = any(made.fault == "emptied valkey" for made in self.rounds)
        unasked = 0 if emptied else self.verdict.fates.get("named", 0)
        return self.verdict.passed and self.drained and not (unasked or self.versions_back or self.left or self.blind)


class Harness:
    """One run under chaos, from its start or from where it stopped to its audit."""

    def __init__(
        self, folder: Path, seed: int, say: Say, *, pause_s: float = PAUSE_S, deadline_s: float = DEADLINE_S
    ) -> None:
        self.folder = folder
        self._seed = seed
        self._say = say
        self._pause_s = pause_s
        self._deadline_s = deadline_s
        self._ended: list[str] = []
        (folder / "rounds").mkdir(parents=True, exist_ok=True)

    def rounds(self) -> list[Round]:
        """Those made so far."""
        return [Round(**json.loads(path.read_text())) for path in sorted((self.folder / "rounds").glob("*.json"))]

    def run(self, faults: Sequence[Fault]) -> Outcome:
        """Make the rounds that are missing, then drain, stop and judge. RuntimeError when the run does not start."""
        system = System(self.folder, self._seed, self._note_end)
        left: list[int] = []
        try:
            self._start(system)
            for number, fault in list(enumerate(faults, start=1))[len(self.rounds()) :]:
                self._show(self._round(system, number, fault))
            drained = self._drain(system)
            with system.valkey() as client:
                evidence = gather(self.folder, system.config.run.name, client)
        finally:
            left = system.close()
        served = [line["version"] for line in events(self.folder, "weights", "engine serves")]
        published = [line["version"] for line in events(self.folder, "trainer", "version published")]
        return Outcome(
            rounds=self.rounds(),
            verdict=audit(evidence),
            drained=drained,
            reward=statistics.fmean(rewards(self.folder, REWARD_WINDOW)),
            versions_back=falls(published) + falls(served),
            left=left,
            blind=system.proxies.errors,
        )

    def _start(self, system: System) -> None:
        began = time.time()
        if not system.fleet.wait(lambda: system.trained_since(began) and not system.fleet.unready(), START_S):
            unready = ", ".join(system.fleet.unready()) or "none"
            msg = f"no update within {START_S:.0f} s of the start, not ready: {unready}; see {self.folder}/logs"
            raise RuntimeError(msg)
        self._say(f"started after {time.time() - began:.0f} s, update {system.update}: {self.folder}")

    def _round(self, system: System, number: int, fault: Fault) -> Round:
        system.look()
        before, self._ended = system.update, []
        injected_s = time.time()
        done = fault.inject(system, Random(f"{self._seed}/{number}"))
        system.fleet.keep(fault.hold_s)
        fault.heal(system)
        healed, healed_s = time.monotonic(), time.time()
        ready_s: list[float] = []

        def recovered() -> bool:
            if system.fleet.unready() or not system.claimed():
                ready_s.clear()
                return False
            if not ready_s:
                ready_s.append(time.time())
            return system.trained_since(max(healed_s, ready_s[0]))

        in_time = system.fleet.wait(recovered, self._deadline_s)
        took_s = time.monotonic() - healed
        made = Round(
            number=number,
            fault=fault.name,
            kind=fault.kind,
            done=done,
            injected_s=injected_s,
            recovery_s=round(took_s, 2) if in_time else None,
            waiting_for=[] if in_time else [*system.fleet.unready(), "an update"],
            update_before=before,
            update_after=system.update,
            ended=self._ended,
        )
        self._write(made)
        if in_time:
            system.fleet.keep(self._pause_s)
        return made

    def _drain(self, system: System) -> bool:
        """End the worker, let the rest train what is there, end the trainer; whether only a remainder was left."""
        remainder = system.config.trainer.trajectories_per_update - 1
        trajectories, scored = (system.keys.stream(name) for name in StreamName)
        with system.valkey() as client:

            def drained() -> bool:
                try:
                    return bool(client.xlen(trajectories) == 0 and client.xlen(scored) <= remainder)
                except redis.RedisError:  # the last fault may still be healing
                    return False

            ended = system.fleet.retire("worker")
            only_a_remainder = system.fleet.wait(drained, DRAIN_S)
        return system.fleet.retire("trainer", timeout_s=60) and ended and only_a_remainder

    def _note_end(self, process: str, how: str) -> None:
        self._ended.append(f"{process}: {how}")

    def _write(self, made: Round) -> None:
        path = self.folder / "rounds" / f"{made.number:04d}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(made), indent=1))
        temporary.replace(path)

    def _show(self, made: Round) -> None:
        took = f"recovered after {made.recovery_s:4.1f} s" if made.recovery_s is not None else "NOT RECOVERED IN TIME"
        updates = f"updates {made.update_before} to {made.update_after}"
        self._say(f"{made.number:4d}  {made.fault:22s}  {took}  {updates}  {made.done}")


def summary(outcome: Outcome) -> dict[str, Any]:
    """What a result file keeps."""
    by_fault: dict[str, list[Round]] = {}
    kinds: dict[str, int] = {}
    for made in outcome.rounds:
        by_fault.setdefault(made.fault, []).append(made)
        kinds[made.kind] = kinds.get(made.kind, 0) + 1
    times = [made.recovery_s for made in outcome.rounds if made.recovery_s is not None]
    return {
        "passed": outcome.passed,
        "rounds": len(outcome.rounds),
        "recovered_in_time": len(times),
        "recovery_median_s": round(statistics.median(times), 1) if times else None,
        "recovery_worst_s": max(times, default=None),
        "by_kind": dict(sorted(kinds.items())),
        "by_fault": {
            name: {"times": len(made), "recovery_s": [one.recovery_s for one in made]}
            for name, made in sorted(by_fault.items())
        },
        "audit": asdict(outcome.verdict),
        "drained": outcome.drained,
        f"reward_last_{REWARD_WINDOW}": round(outcome.reward, 4),
        "versions_back": outcome.versions_back,
        "processes_left": outcome.left,
        "ledger_errors": outcome.blind,
    }
