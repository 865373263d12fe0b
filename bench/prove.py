"""Prove the claims of the README by running the real system: `python -m bench.prove NAME`, `--help` lists them.

Each seed is one run of `sao up` with every real process, or of those that the claim is about. The result file names
the commit and the machine, keeps every seed, and is written after each run, so an interrupted proof goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx

from bench import algorithms as every_algorithm
from bench import online as styles
from bench.comparison import draw_comparison
from bench.feedback import run as late_feedback
from bench.fuzz.run import Share
from bench.fuzz.run import fuzz as fuzz_services
from bench.judge.run import prove as prove_judge
from bench.preferences.run import prove as put_under_load
from bench.soak.run import soak as soak_services
from bench.transitions.run import prove as kill_engine_in
from bench.weights.failures import prove as provoke_failures
from bench.weights.fleet import prove as publish_to_a_fleet
from bench.weights.rollback import prove as roll_back
from bench.weights.sync import prove as measure_sync
from sao.board.base import EngineState
from sao.config import load_run_config
from sao.config.algorithms import ALGORITHMS, AlgorithmName
from sao.curves import moving_average
from sao.rows import TrainedRow, read_rows
from sao.tasks import load_task
from sao.tasks.base import OffersPreferences

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SWITCH_AT, RECOVER_WITHIN, LEVEL_WINDOW = 150, 150, 50
"""Update of the preference switch, updates it may take to recover, trajectories over which a level is a mean."""


def start(run: Path, seed: str, *arguments: str) -> subprocess.Popen[bytes]:
    """`sao up` in the background; its output in <run>.log."""
    run.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "sao.cli.main", "up", "--seed", seed, "--run-dir", str(run), *arguments]
    with run.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def finish(process: subprocess.Popen[bytes], run: Path) -> dict[str, Any]:
    """Wait for the run's end (an hour at most) and read its report; RuntimeError when it failed."""
    code = process.wait(timeout=3600)
    if code != 0:
        msg = f"sao up ended with {code}:\n{run.with_suffix('.log').read_text()[-2000:]}"
        raise RuntimeError(msg)
    report: dict[str, Any] = json.loads((run / "report.json").read_text())
    return report


def learning(seed: str, run: Path) -> dict[str, Any]:
    """Bar: the mean of 100 goes from at most 0.40 to at least 0.80 within 5 minutes of the first trajectory."""
    report = finish(start(run, seed, "--preset", "tiny", "--updates", "250"), run)
    curve = report["reward_curve"]
    hit = next((point for point in curve if point["moving_average"] >= 0.80), None)
    passed = curve[0]["moving_average"] <= 0.40 and hit is not None and hit["wall_s"] <= 300
    return {"passed": passed, "first": curve[0], "reached_0.80": hit, "last": curve[-1], **common(report)}


def streaming(seed: str, run: Path) -> dict[str, Any]:
    """Bar: one trajectory per update, 800 updates: the last 200 rewards average at least 0.70, from at most 0.40."""
    sets = ["--set", "trainer.trajectories_per_update=1", "--updates", "800"]
    report = finish(start(run, seed, "--preset", "tiny", *sets), run)
    rewards = [trained.reward for trained in rows_of(run)]
    first, last = mean(rewards[:100]), mean(rewards[-200:])
    passed = first <= 0.40 and last >= 0.70
    return {"passed": passed, "first_100": first, "last_200": last, **common(report)}


def preference(seed: str, run: Path) -> dict[str, Any]:
    """Bar: one PUT; whatever is scored after the 200 carries the new version; reward recovers within 150 updates."""
    process = start(run, seed, "--preset", "tiny-writing", "--updates", str(SWITCH_AT + RECOVER_WITHIN + 10))
    wait_for(lambda: any(row.update >= SWITCH_AT for row, _ in read_rows(run / "updates.jsonl")), process)
    answer, answered_s = switch(run, "chuunibyou")
    report = finish(process, run)
    rows = rows_of(run)
    late = [row for row in rows if row.scoring_started_s > answered_s]
    wrong = [row.id for row in late if row.scored_under != answer["version"]]
    before = [row.reward for row in rows if row.trained_under < answer["version"]]
    level = mean(before[-LEVEL_WINDOW:])
    after = [row.reward for row in rows if row.trained_under == answer["version"]]
    means = [mean(after[i : i + LEVEL_WINDOW]) for i in range(len(after) - LEVEL_WINDOW + 1)]
    ends = next((i + LEVEL_WINDOW for i, value in enumerate(means) if value >= 0.8 * level), None)
    per_update = load_run_config(run / "run.toml", env={}).trainer.trajectories_per_update
    updates = None if ends is None else -(-ends // per_update)
    return {
        "passed": bool(late) and not wrong and updates is not None and updates <= RECOVER_WITHIN,
        "scored_after_the_200": len(late),
        "of_these_under_another_version": wrong,
        "level_before": level,
        "level_right_after": means[0] if means else None,
        "recovered_to_0.8_of_it_after_updates": updates,
        "best_level_after": max(means, default=None),
        **common(report),
    }


def engines(seed: str, run: Path) -> dict[str, Any]:
    """Bar: of two engines, both are verified to serve the newest version when the run ends."""
    report = finish(start(run, seed, "--preset", "tiny", "--engines", "2", "--updates", "60"), run)
    newest = [row.version for row, _ in read_rows(run / "updates.jsonl") if row.version][-1]
    events = [json.loads(line) for line in (run / "logs" / "weights.log").read_text().splitlines() if line[:1] == "{"]
    served = [event for event in events if event["event"] == "engine serves"]
    last = {event["engine"]: event["version"] for event in served}
    worst = max(event["worst"] for event in served)
    return {
        "passed": last == {"engine-0": newest, "engine-1": newest},
        "newest": newest,
        "last_served": last,
        "rounds": len(served),
        "largest_canary_difference": worst,
        **common(report),
    }


def stability(case: str, run: Path) -> dict[str, Any]:
    """Bar: SAO under lag (tau 8, publish_every 2, mean lag at least 4), 1,000 updates: the last 500 rewards average at
    least 0.9 of the best average of any 500. The other algorithms are shown as they come.
    """
    algorithm, _, seed = case.rpartition("-")
    sets = [f'trainer.algorithm="{algorithm}"', "trainer.max_lag=8", "trainer.publish_every=2"]
    sets += ["rollout.concurrency=20", *(["group.size=4"] if algorithm.startswith("grpo") else [])]
    arguments = [word for text in sets for word in ("--set", text)]
    report = finish(start(run, seed, "--preset", "tiny", "--updates", "1000", *arguments), run)
    averages = moving_average([trained.reward for trained in rows_of(run)], 500)
    kept = averages[-1] / max(averages)
    curve = report["reward_curve"]
    curve = [*curve[:: max(len(curve) // 400, 1)], curve[-1]]
    rows = [row for row, _ in read_rows(run / "updates.jsonl")]
    return {
        "passed": algorithm != "sao" or (kept >= 0.9 and report["lag"]["mean"] >= 4),
        "last_500": averages[-1],
        "best_500": max(averages),
        "share_kept": kept,
        "mean_lag": report["lag"]["mean"],
        "entropy_last": rows[-1].metrics["entropy"],
        "curve": [[point["trajectory"], round(point["moving_average"], 4)] for point in curve],
        **common(report),
    }


def online(case: str, run: Path) -> dict[str, Any]:
    """Bar: the style is switched at updates 150 (cute to chuunibyou) and 300 (to classical): SAO is back at 0.8 of its
    level before the switch, a mean of 50, within 150 updates after both switches on at least 2 of 3 seeds. The global
    moving average (reinforce_ma, 128 rewards) is shown beside it as it comes.
    """
    algorithm, _, seed = case.rpartition("-")
    sets = [f'trainer.algorithm="{algorithm}"']
    if algorithm == "reinforce_ma":
        sets += ['moving_average.scope="global"', "moving_average.window=128"]
    arguments = [word for text in sets for word in ("--set", text)]
    updates = styles.SWITCHES[-1] + styles.RECOVER_WITHIN + 5
    process = start(run, seed, "--preset", "tiny-writing", "--updates", str(updates), *arguments)
    for at, style in zip(styles.SWITCHES, styles.STYLES[1:], strict=True):
        wait_for(lambda at=at: any(row.update >= at for row, _ in read_rows(run / "updates.jsonl")), process)  # type: ignore[misc]
        switch(run, style)
    report = finish(process, run)
    per_update = load_run_config(run / "run.toml", env={}).trainer.trajectories_per_update
    phases = styles.phases(rows_of(run))
    after = [styles.followed(*pair, per_update) for pair in itertools.pairwise(phases)]
    return {
        "passed": len(after) == len(styles.SWITCHES) and all(one["followed"] for one in after),
        "switches": after,
        "mean_reward": [round(mean(phase), 4) for phase in phases],
        "curve": styles.curve([row for row, _ in read_rows(run / "updates.jsonl")]),
        **common(report),
    }


FUZZ_BLOCKS, FUZZ_SEEDS, FUZZ_MALFORMED = 10, 12_000, 10_000
"""Blocks, seeds of each, and malformed messages that come of them at least: about nine in ten are."""


def fuzz(case: str, run: Path) -> dict[str, Any]:
    """Bar: 10^5 malformed gRPC messages and 10^4 fuzzed REST requests: no process ends, no malformed message is on a
    stream, every whole one is, no answer of 5xx, no traceback. Routing replay is on in every other block.
    """
    block = int(case)
    share = Share(
        grpc=range(block * FUZZ_SEEDS, (block + 1) * FUZZ_SEEDS), rest=range(block * 1000, (block + 1) * 1000)
    )
    run.mkdir(parents=True)
    found = asyncio.run(fuzz_services(share, run, replay=block % 2 == 1))
    return {**found, "passed": found["passed"] and found["counts"]["grpc malformed"] >= FUZZ_MALFORMED}


def soak(_case: str, run: Path) -> dict[str, Any]:
    """Bar: 50,000 trajectories of 8 KiB through ingest and reward to a trainer that trains nothing, in 20 minutes at
    most; after 10,000 of them Valkey grows by at most 200 bytes for each, every process by 20, and neither open files
    nor tasks.
    """
    run.mkdir(parents=True)
    found = asyncio.run(soak_services(run, trajectories=50_000, warm=10_000))
    return {**found, "passed": found["passed"] and found["seconds"] <= 1200}


def put(_case: str, run: Path) -> dict[str, Any]:
    """Bar: 1,000 PUTs of 8 clients to two reward services whose queue is never empty at 200 scorings a second or more:
    versions and audit log without a gap, exactly one winner for each If-Match, no scoring that started after a 200
    under an older version on either replica, p99 of a PUT at most 100 ms.
    """
    run.mkdir(parents=True)
    return put_under_load(run, puts=1000)


def transitions(case: str, run: Path) -> dict[str, Any]:
    """Bar: a real engine killed while its keeper is in each state is out of rotation within 5 s, with the reason on the
    board, and, started again with its launch checkpoint, in rotation only with the newest version, to the bit; the
    weights service goes on.
    """
    run.mkdir(parents=True)
    return kill_engine_in(EngineState(case), run)


def judge(_case: str, run: Path) -> dict[str, Any]:
    """Bar: a judge that fails 30 % of its calls (half cut off, a quarter each 500 and garbage) and never answers 10 %:
    outcomes are counted exactly as they were injected, none that failed is a number, and the task's components of 1,500
    trajectories offered at 50/s are computed at no less than 0.95 of the throughput of a run without a judge, whether
    the preference reads the judge or not.
    """
    run.mkdir(parents=True)
    return asyncio.run(prove_judge(run))


LATE_FEEDBACK = {"lag-4": 4, "lag-1000": 1000}
"""trainer.max_lag: with the preset's own, what is three minutes late is stale; with the other it trains."""


def feedback(case: str, run: Path) -> dict[str, Any]:
    """Bar: one trajectory in five waits for feedback. Fifty of them are answered three minutes late, the others never:
    each of the fifty is trained on, stale or expired, by name; what nobody answers expires; every trajectory is
    accounted for, over a stop of all and a start in the middle of it. Meanwhile more of them wait than admission would
    allow, no half minute has fewer than half the median one's updates, and no two updates are more than 15 s apart.
    """
    sets = [*late_feedback.SETTINGS, f"trainer.max_lag={LATE_FEEDBACK[case]}", "checkpoint.every_updates=25"]
    arguments = [word for text in sets for word in ("--set", text)]
    process = start(run, "0", "--preset", "tiny-writing", "--updates", "1000000", *arguments)
    try:
        wait_for(lambda: any(read_rows(run / "updates.jsonl")), process)
        config = load_run_config(run / "run.toml", env={})
        answers = late_feedback.answer_late(config, run, lambda: process.poll() is None)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
    last = max(row.update for row, _ in read_rows(run / "updates.jsonl"))
    finish(start(run, "0", "--updates", str(last + 10)), run)
    found = late_feedback.judge(config, run, answers)
    enough = case != "lag-4" or found["waiting_peak"] > found["admission_limit"]
    return {**found, "passed": found["passed"] and enough}


def algorithms(case: str, run: Path) -> dict[str, Any]:
    """Bar: 100 updates on the real stack: none missing or skipped, nothing trained twice, no process started again;
    groups whole and each rollout compared with its fellow; lag where the algorithm is asynchronous, none where not.
    """
    algorithm = cast("AlgorithmName", case)
    report = finish(start(run, "0", *every_algorithm.arguments(algorithm)), run)
    found = every_algorithm.judge(algorithm, run)
    return {"passed": not found["problems"], **found, **common(report)}


WEIGHTS = {
    "failures": provoke_failures,
    "fleet": publish_to_a_fleet,
    "sync": measure_sync,
    "rollback": roll_back,
}


def weights(case: str, run: Path) -> dict[str, Any]:
    """Bar: (failures) every failure of a weight update that a real engine has, provoked on two of them: the service
    says which engine and why, and no unproven version is ever in rotation. (fleet) Three engines under continuous
    generation through 50 versions, one killed and one stopped: every token is of a version verified on its engine, no
    episode is lost, every log-prob is the named version's to 1e-4. (sync) 103 M parameters: commit to serving takes at
    most 1.5 of a copy and a plain reload, the pause at most a quarter of it. (rollback) From the POST until three
    engines under load serve the old version takes at most 1.5 of a publication; publishing then waits for `:resume`.
    """
    run.mkdir(parents=True)
    return WEIGHTS[case](run)


SEEDS = ("0", "1", "2")


@dataclass(frozen=True)
class Proof:
    """One claim of the README: how a case of it is run and judged."""

    prove: Callable[[str, Path], dict[str, Any]]
    cases: Sequence[str] = SEEDS
    enough: Callable[[Mapping[str, Mapping[str, Any]]], bool] = lambda cases: all(
        case["passed"] for case in cases.values()
    )
    """What of its cases must have passed."""
    marks: Sequence[int] = ()
    """Updates to mark in the picture, whose curves then run over updates."""


PROOFS: dict[str, Proof] = {
    "algorithms": Proof(algorithms, tuple(ALGORITHMS)),
    "learning": Proof(learning),
    "streaming": Proof(streaming),
    "preference": Proof(preference),
    "engines": Proof(engines),
    "feedback": Proof(feedback, tuple(LATE_FEEDBACK)),
    "fuzz": Proof(fuzz, tuple(map(str, range(FUZZ_BLOCKS)))),
    "put": Proof(put, ("0",)),
    "soak": Proof(soak, ("0",)),
    "judge": Proof(judge, ("0",)),
    "transitions": Proof(transitions, tuple(state.value for state in EngineState)),
    "weights": Proof(weights, tuple(WEIGHTS)),
    "stability": Proof(stability, ("sao-0", "sao-1", "sao-2", "vapo-0", "grpo_async-0")),
    "online": Proof(
        online,
        tuple(f"{algorithm}-{seed}" for algorithm in ("sao", "reinforce_ma") for seed in SEEDS),
        styles.enough,
        styles.SWITCHES,
    ),
}


def switch(run: Path, name: str) -> tuple[dict[str, Any], float]:
    """PUT one of the task's preferences; the answer, and the time at which it was there."""
    config = load_run_config(run / "run.toml", env={})
    task = load_task(config.task.name)
    assert isinstance(task, OffersPreferences)
    url = f"http://127.0.0.1:{config.reward.port}/v1/preferences"
    answer = httpx.put(url, json=task.preferences[name].model_dump(mode="json"), timeout=10)
    answer.raise_for_status()
    return answer.json(), time.time()


def rows_of(run: Path) -> list[TrainedRow]:
    """Every trained trajectory in order."""
    return [trained for row, _ in read_rows(run / "updates.jsonl") for trained in row.trajectories]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], timeout_s: float = 1800) -> None:
    """Return when the condition holds; RuntimeError when the run ends first or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            msg = f"the run ended ({process.poll()}) or {timeout_s} s passed before the switch"
            raise RuntimeError(msg)
        time.sleep(0.2)


def common(report: dict[str, Any]) -> dict[str, Any]:
    """What every proof keeps of a report."""
    return {key: report[key] for key in ("seed", "updates", "trajectories", "lag", "drops", "wall", "throughput")}


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    return sum(values) / len(values) if values else float("nan")


def commit() -> str:
    """The commit proven, marked `-dirty` when the work tree differs from it anywhere but in the results."""
    head = git("rev-parse", "--short=12", "HEAD")
    return f"{head}-dirty" if git("status", "--porcelain", "--", ".", ":!bench/results") else head


def machine() -> dict[str, Any]:
    """What a result was measured on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def git(*arguments: str) -> str:
    """What git answers in this repository."""
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def main() -> int:
    """Prove what the command line names; 0 when every seed passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("proof", choices=sorted(PROOFS))
    parser.add_argument("--cases", help="comma-separated; default: all of the proof")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "prove", help="where the run folders go")
    options = parser.parse_args()
    proof = PROOFS[options.proof]
    path = RESULTS / f"{options.proof}.json"
    now = commit()
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if result.get("commit") != now:
        bar = " ".join((proof.prove.__doc__ or "").split()).removeprefix("Bar: ")
        result = {"proof": options.proof, "bar": bar, "commit": now, "seeds": {}}
    result["machine"] = machine()
    for case in options.cases.split(",") if options.cases else proof.cases:
        if case in result["seeds"]:
            continue
        run = options.runs / f"{options.proof}-{case}-{now}"
        if run.exists():  # a run that was cut short proves nothing
            run.rename(run.with_name(f"{run.name}-cut-{int(time.time())}"))
        result["seeds"][case] = proof.prove(case, run)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
        hidden = {"wall", "throughput", "lag", "drops", "curve", "samples"}
        shown = {k: v for k, v in result["seeds"][case].items() if k not in hidden}
        print(f"seed {case}: {json.dumps(shown)}", flush=True)
    curves = {case: entry["curve"] for case, entry in result["seeds"].items() if "curve" in entry}
    if curves:
        draw_comparison(curves, path.with_suffix(".png"), title=f"{options.proof}: {result['bar']}", marks=proof.marks)
    passed = sum(entry["passed"] for entry in result["seeds"].values())
    print(f"{options.proof}: {passed} of {len(result['seeds'])} seeds passed ({path.relative_to(ROOT)})")
    return 0 if proof.enough(result["seeds"]) else 1


if __name__ == "__main__":
    sys.exit(main())
