"""Who gets through to whom: every port of every host tried from every other, by a small program in its namespace.

As that program it is `python -m tools.network.reach SECONDS`, with lines of address and port on its standard input.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from sao.doctor.names import ask
from tools.manifests.render import ROOT
from tools.network.hosts import Host
from tools.network.namespaces import World
from tools.network.rules import Ruleset

ANSWERS, REFUSES, SILENT = "answers", "refuses", "silent"
"""The last one is what a closed edge is; `refuses` is a pod that was reached and does not listen there."""
TRY_S, ALL_S = 2.0, 60
DNS = {"53/UDP", "53/TCP"}


def ports(hosts: Sequence[Host]) -> dict[str, set[str]]:
    """What each host listens on."""
    found = {host.name: set[str]() for host in hosts}
    for host in hosts:
        if "dns" in host.peer.roles:
            found[host.name] |= DNS
        for container in host.pod.containers if host.pod is not None else []:
            declared = container.get("ports") or []
            found[host.name] |= {f"{one['containerPort']}/{one.get('protocol', 'TCP')}" for one in declared}
    return found


def tried(world: World) -> dict[tuple[str, str, str], str]:
    """What each (source, target, port) comes to, for every port that anybody listens on."""
    every = sorted(set().union(*ports(world.hosts).values()))
    asked = {
        source.name: [(target, port) for target in world.hosts if target != source for port in every]
        for source in world.hosts
    }
    running = {
        source.name: _started(world, source, "".join(f"{host.address} {port}\n" for host, port in asked[source.name]))
        for source in world.hosts
    }
    found = {}
    for name, process in running.items():
        told, _ = process.communicate(timeout=ALL_S)
        for (target, port), word in zip(asked[name], told.split(), strict=True):
            found[name, target.name, port] = word
    return found


def _started(world: World, source: Host, lines: str) -> subprocess.Popen[str]:
    command = world.inside(source, sys.executable, "-m", "tools.network.reach", str(TRY_S))
    with tempfile.TemporaryFile("w+") as asked:
        asked.write(lines)
        asked.seek(0)
        return subprocess.Popen(command, cwd=ROOT, stdin=asked, stdout=subprocess.PIPE, text=True)  # noqa: S603


def differences(world: World, ruleset: Ruleset, found: Mapping[tuple[str, str, str], str]) -> list[str]:
    """What got through and is no edge, or is one and did not; empty when the rules are what they say."""
    listens, by_name = ports(world.hosts), {host.name: host for host in world.hosts}
    problems = []
    for (source, target, port), word in sorted(found.items()):
        edge = ruleset.passes(by_name[source], by_name[target], port)
        wanted = (ANSWERS if port in listens[target] else REFUSES) if edge else SILENT
        if word != wanted:
            kind = "an edge" if edge else "no edge"
            problems.append(f"{source} -> {target} {port} is {kind}, expected {wanted}, found {word}")
    return problems


async def _try(address: str, port: str, limit_s: float) -> str:
    number, _, protocol = port.partition("/")
    if protocol == "UDP":
        problem = await ask(address, "UDP", "kubernetes.default.svc.cluster.local", timeout_s=limit_s, port=int(number))
        return REFUSES if problem.startswith("ConnectionRefusedError") else SILENT if problem else ANSWERS
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(address, int(number))
    except TimeoutError:
        return SILENT
    except ConnectionRefusedError:
        return REFUSES
    writer.close()
    return ANSWERS


async def main(limit_s: float) -> None:
    """Try what standard input says, all at once; one word for each, in order."""
    asked = [line.split() for line in sys.stdin]
    words = await asyncio.gather(*(_try(address, port, limit_s) for address, port in asked))
    sys.stdout.write(" ".join(words))


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
