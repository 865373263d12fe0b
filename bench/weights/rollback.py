"""How long a rollback takes under load, from the POST until every engine serves the old version, beside a publication.

After it publishing waits for `:resume`: a version that is published meanwhile serves nobody.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.weights.fleet import CLIENTS_PER_ENGINE, PER_VERSION, Fleet, judge, running, started
from tests.support.engine import EngineServer

RATIO = 1.5
TIMES = 9


@dataclass
class Seconds:
    """Of everything that was timed, until every engine served what was asked for."""

    publications: list[float] = field(default_factory=list)
    rollbacks: list[float] = field(default_factory=list)


class Console:
    """The operator's side of a fleet."""

    def __init__(self, fleet: Fleet, http: httpx.AsyncClient) -> None:
        self._fleet = fleet
        self._http = http

    async def publish(self) -> tuple[str, float]:
        """The next version, and the seconds from its announcement until every engine serves it."""
        manifest = await self._fleet.publisher.publish()
        started = time.monotonic()
        await self._fleet.serves(manifest.version)
        return manifest.version, time.monotonic() - started

    async def activate(self, version: str) -> float:
        """Seconds from the POST until every engine serves it."""
        started = time.monotonic()
        await self._post(f"/{version}:activate")
        await self._fleet.serves(version)
        return time.monotonic() - started

    async def resume(self) -> None:
        """Let publishing go on."""
        await self._post(":resume")

    async def _post(self, path: str) -> None:
        (await self._http.post(f"/v1/weights{path}", json={"reason": "make prove-weights"})).raise_for_status()


async def roll_back(fleet: Fleet, times: int) -> tuple[Seconds, list[str]]:
    """Publish, go back by one, see that nothing newer serves, go on; so many times, under load."""
    seconds, problems = Seconds(), []
    stop = asyncio.Event()
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{fleet.config.weights.port}", timeout=60) as http,
        asyncio.TaskGroup() as group,
    ):
        console = Console(fleet, http)
        old, _ = await console.publish()
        count = CLIENTS_PER_ENGINE * len(fleet.servers)
        clients = [group.create_task(fleet.rollouts.play(stop)) for _ in range(count)]
        for _ in range(times):
            new, taken = await console.publish()
            seconds.publications.append(taken)
            await fleet.sampled(PER_VERSION)
            seconds.rollbacks.append(await console.activate(old))
            waiting = await fleet.publisher.publish()
            begun = len(fleet.rollouts.samples)
            await fleet.sampled(2 * PER_VERSION)
            sampled = {span[0] for sample in fleet.rollouts.samples[begun:] for span in sample.spans}
            if waiting.version in sampled:
                problems.append(f"{waiting.version} was sampled from before publishing was resumed")
            if old not in sampled:
                problems.append(f"nothing was sampled from {old} after going back to it from {new}")
            await console.resume()
            await fleet.serves(waiting.version)
            old = waiting.version
        stop.set()
        await asyncio.gather(*clients)
    await fleet.witness.look()
    return seconds, problems


def verdict(seconds: Seconds) -> dict[str, Any]:
    """The medians against the bar."""
    publication, rollback = statistics.median(seconds.publications), statistics.median(seconds.rollbacks)
    ratio = round(rollback / publication, 3)
    problems = [f"a rollback takes {ratio} of a publication, allowed {RATIO}"] if ratio > RATIO else []
    found = {"publication_s": round(publication, 3), "rollback_s": round(rollback, 3), "ratio": ratio}
    return {**found, "problems": problems}


async def prove_on(
    folder: Path, valkey_url: str, servers: Sequence[EngineServer], checkpoint: Path, *, times: int
) -> dict[str, Any]:
    """Run, then judge, what was sampled included."""
    async with running(folder, valkey_url, servers, checkpoint) as fleet:
        seconds, problems = await roll_back(fleet, times)
    sampled, timed = judge(fleet), verdict(seconds)
    problems += [*sampled["problems"], *timed["problems"]]
    return {**sampled, **timed, "passed": not problems, "problems": problems, "seconds": vars(seconds)}


def prove(folder: Path) -> dict[str, Any]:
    """Three engines."""
    with started(folder, engines=3) as (url, servers, checkpoint):
        return asyncio.run(prove_on(folder, url, servers, checkpoint, times=TIMES))
