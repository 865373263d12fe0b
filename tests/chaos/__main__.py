"""`make chaos ROUNDS=n`: n faults on a run with every real process, one line a round, then the audit."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path

from bench.prove import RESULTS, ROOT, commit
from tests.chaos.faults import FAULTS, deck
from tests.chaos.harness import REWARD_BAR, Harness, summary


def main() -> int:
    """0 when the audit passed and the reward reached its bar, 1 when not, 130 when interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the run and of the faults' order")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "chaos", help="where the run folder goes")
    parser.add_argument("--faults", help=f"separated by `;`, instead of the seed's choice: {'; '.join(FAULTS)}")
    options = parser.parse_args()
    now = commit()
    folder: Path = (options.runs / f"{now}-seed{options.seed}").resolve()
    faults = deck(options.seed, options.rounds)
    if options.faults:
        faults = [FAULTS[name.strip()] for name in options.faults.split(";")]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    try:
        outcome = Harness(folder, options.seed, _say).run(faults)
    except KeyboardInterrupt:
        _say("interrupted: the same command goes on after the last whole round")
        return 130
    passed = outcome.passed and outcome.reward >= REWARD_BAR
    result = {
        "commit": now,
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "seed": options.seed,
        "wall_s": round(time.monotonic() - began),
        **summary(outcome),
        "passed": passed,
    }
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    if not options.faults:
        (RESULTS / "chaos.json").write_text(json.dumps(result, indent=2) + "\n")
    verdict = outcome.verdict
    fates = ", ".join(f"{count} {fate}" for fate, count in sorted(verdict.fates.items()))
    _say(f"audit: {verdict.acknowledged} acknowledged trajectories: {fates}; {len(verdict.twice)} trained twice")
    _say(f"reward of the last 200: {outcome.reward:.3f}; versions that went back: {len(outcome.versions_back)}")
    _say(f"{'PASSED' if passed else 'FAILED'}: {folder / 'result.json'}")
    return 0 if passed else 1


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
