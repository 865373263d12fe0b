"""`make alerts-check`: promtool over rules and their unit tests, then a real Prometheus over a real run."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from bench.alerts.run import check, promtool, result
from bench.prove import RESULTS, commit, start

UPDATES = 60


def main() -> int:
    """0 when everything is sound, 1 with what is not, 2 when a program is missing."""
    missing = [name for name in ("promtool", "prometheus") if shutil.which(name) is None]
    if missing:
        print(f"{' and '.join(missing)} missing: on Debian, apt-get install prometheus", file=sys.stderr)
        return 2
    now, began = commit(), time.monotonic()
    refused = promtool()
    folder = Path(tempfile.mkdtemp(prefix="sao-alerts-"))
    process = start(folder / "run", "0", "--preset", "tiny", "--updates", str(UPDATES))
    try:
        found = check(folder / "run", process)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60)
    (RESULTS / "alerts.json").write_text(
        result(now, refused, found | {"wall_s": round(time.monotonic() - began, 1)}), encoding="utf-8"
    )
    for problem in [*refused, *found["problems"]]:
        print(problem, file=sys.stderr)
    passed = found["passed"] and not refused
    if passed:
        shutil.rmtree(folder)
    counted = (
        ", ".join(f"{count} {kind}s" for kind, count in found["evaluated"].items()) if "evaluated" in found else ""
    )
    empty = len(found.get("empty_and_explained", {}))
    verdict = "passed" if passed else f"failed ({folder})"
    print(f"alerts: {verdict}: {counted}; {empty} empty for a known reason (bench/results/alerts.json)")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
