"""`make network-check`: the whole stack where nothing passes but the NetworkPolicies' edges, then each edge taken away.

Every pod of overlay `cpu` is a network namespace of this machine, with iptables made from the rendered policies, names
from a name server and the manifests' own commands: a real SGLang on CPU, a real Valkey, every service. Two rollout
pods, so that workers reach each other's engines.

reach    every port of every pod is tried from every other: what answers is an edge, and nothing else does
train    20 updates and two served weight versions
doctor   `sao doctor` in each pod is well; without each edge it fails and names that one; with it, it is well again
status   `sao status` by the run file says in a pod how far the run is

The result is bench/results/network.json. Needs Linux, root, and the programs it names when they are missing.
Exit status 0: all as it must be; 1: something was not; 2: it could not be tried here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from bench.prove import RESULTS, commit
from sao.supervisor.engine import NoEngineEnvironmentError, engine_python
from tools.manifests import edges
from tools.manifests.edges import Edge
from tools.manifests.render import ROOT, RenderError, render_overlay
from tools.network import check, reach
from tools.network.check import Told
from tools.network.hosts import hosts
from tools.network.namespaces import NamespaceError, World, lacking, world
from tools.network.rules import Ruleset, translate
from tools.network.stack import Stack, StackError, running

OVERLAY = "cpu"
REPLICAS = {"rollout": 2}
UPDATES, VERSIONS, TRAIN_S, WELL_S = 20, 2, 900.0, 180.0
BAR = (
    "every port of every pod tried from every other: what answers is an edge and nothing else does; 20 updates, two "
    "served versions; `sao doctor` in each pod is well, without each edge it fails and names that one alone, put back "
    "it is well again; `sao status` by the run file says how far it is"
)
_started = time.monotonic()


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs and volumes")
    keep: bool = parser.parse_args(argv).keep
    signal.signal(signal.SIGTERM, _interrupt)
    if reason := lacking():
        sys.stderr.write(f"network-check: {reason}\n")
        return 2
    work = Path(tempfile.mkdtemp(prefix="sao-network-"))
    work.chmod(0o755)
    try:
        engine_python(Path(".venv-engine"))
        result = run(work)
    except (FileNotFoundError, RenderError, NoEngineEnvironmentError) as error:
        sys.stderr.write(f"network-check: {error}\n")
        return 2
    except (NamespaceError, StackError, ValueError) as error:
        sys.stderr.write(f"network-check: {error}\n")
        keep = True
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("network-check: interrupted; namespaces and processes are gone\n")
        return 130
    finally:
        if keep:
            sys.stderr.write(f"network-check: logs and volumes are in {work}\n")
        else:
            shutil.rmtree(work, ignore_errors=True)
    path = RESULTS / "network.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    for problem in result["problems"]:
        _tell(f"PROBLEM {problem}")
    _tell(f"{'passed' if result['passed'] else 'FAILED'} ({path.relative_to(ROOT)})")
    return 0 if result["passed"] else 1


def run(work: Path) -> dict[str, Any]:
    """What came of it."""
    proven, objects = commit(), render_overlay(OVERLAY)
    there = hosts(objects, REPLICAS)
    ruleset, table = translate(objects, there), sorted(edges.documented(OVERLAY))
    with world(there, work) as made, running(made, objects, work) as stack:
        made.close(ruleset)
        _tell(f"{len(there)} namespaces, {len(ruleset.accepts)} rules from the policies of overlay {OVERLAY}")
        stack.start_names()
        for step in stack.start():
            _tell(step)
        _train(stack)
        tried = reach.tried(made)
        problems = reach.differences(made, ruleset, tried)
        counts = {
            word: sum(one == word for one in tried.values()) for word in (reach.ANSWERS, reach.REFUSES, reach.SILENT)
        }
        _tell(f"{len(tried)} connections tried: {counts}, {len(problems)} not as the edges say")
        well = _well(stack, {edge.source: None for edge in table})
        results = _each_edge(made, stack, ruleset, table, well)
        status = check.status(stack, "reward")
        _tell(f"{stack.updates()} updates, {len(stack.served())} versions served; sao status: {status.said[:1]}")
        problems += [] if status.exit == 0 else [f"sao status in the reward pod ends with {status.exit}"]
        problems += [f"{one['edge']}: {text}" for one in results for text in one["problems"]]
        problems += [f"{role}: {text}" for role, told in well.items() for text in told.of("fail")]
        return {
            "proof": "network",
            "bar": BAR,
            "commit": proven,
            "machine": {
                "system": f"{platform.system()} {platform.machine()}",
                "cores": os.cpu_count(),
                "python": platform.python_version(),
            },
            "passed": not problems,
            "problems": problems,
            "namespaces": [host.name for host in there],
            "rules": len(ruleset.accepts),
            "connections": {"tried": len(tried), **counts},
            "updates": stack.updates(),
            "versions_served": len(stack.served()),
            "seconds": round(time.monotonic() - _started),
            "well": {
                role: {"exit": told.exit, "warnings": told.of("warn"), "seconds": told.seconds}
                for role, told in well.items()
            },
            "status": status.said,
            "edges": results,
        }


def _train(stack: Stack) -> None:
    deadline, told = time.monotonic() + TRAIN_S, -1
    while (updates := stack.updates()) < UPDATES or len(stack.served()) < VERSIONS:
        stack.check_alive()
        if time.monotonic() > deadline:
            msg = f"{updates} updates, versions served {stack.served()} within {TRAIN_S:g} s: see the logs"
            raise StackError(msg)
        if updates // 10 > told:
            told = updates // 10
            _tell(f"{updates} updates, {len(stack.served())} versions served")
        time.sleep(0.5)
    _tell(f"{updates} updates, {len(stack.served())} versions served")


def _well(stack: Stack, sources: Mapping[str, None]) -> dict[str, Told]:
    """What the doctor of each role says; asked again until all is well, or it has had time enough."""
    found = {}
    for role in sources:
        deadline = time.monotonic() + WELL_S
        while (told := check.doctor(stack, role)).exit and time.monotonic() < deadline:
            stack.check_alive()
            _tell(f"not well yet, doctor as {role}: {'; '.join(told.of('fail'))}")
        found[role] = told
        _tell(
            f"doctor as {role}: exit {told.exit} in {told.seconds} s; {'; '.join([*told.of('fail'), *told.of('warn')])}"
        )
    return found


def _each_edge(
    made: World, stack: Stack, ruleset: Ruleset, table: Sequence[Edge], well: Mapping[str, Told]
) -> list[dict[str, Any]]:
    results = []
    for one in check.try_edges(made, stack, ruleset, table, well):
        stack.check_alive()
        problems = "".join(f" PROBLEM {text}" for text in one.problems)
        _tell(f"without {one.edge} (at {one.end}): {'; '.join(one.said)}{problems}")
        results.append(one.as_json())
    return results


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _tell(text: str) -> None:
    sys.stdout.write(f"[{time.monotonic() - _started:5.0f} s] {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
