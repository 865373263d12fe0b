"""Eight clients change the preference a thousand times while two reward services score without a pause.

Every process is real: Valkey, two reward services on one store and one run folder, what feeds them, the clients here.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import redis

from sao.config import RunConfig, dump_run_config, load_run_config
from sao.redis_client import RunKeys
from sao.supervisor.valkey import valkey_command
from sao.tasks.writing import Writing
from tests.support.processes import free_port, server
from tests.support.services import service
from tests.support.stores import claim
from tests.support.valkey import answers

CLIENTS, REPLICAS = 8, 2
RATE = 200
"""Trajectories a second that must have been scored."""
P99_S = 0.1
BATCH = 4
"""`reward.batch`: trajectories that a service has in hand. More are no faster here, and a PUT waits behind them."""
URL = "/v1/preferences"
BODIES = [document.model_dump_json().encode() for document in Writing().preferences.values()]


@dataclass(frozen=True)
class Put:
    """One PUT as its client saw it."""

    if_match: int | None
    status: int
    version: int
    """That it made; 0: none."""
    seconds: float
    answered_s: float
    """Unix seconds."""


SCORED = 'sao_reward_outcomes_total{kind="scored"}'
MORE = 20
"""Trajectories of each replica after the last PUT."""


def prove(folder: Path, *, puts: int) -> dict[str, Any]:
    """Half of `puts` unconditional, half under If-Match, all of them under load; what came of it."""
    with running(folder) as (configs, run_file):
        urls = [f"http://127.0.0.1:{config.reward.port}" for config in configs]
        with traffic(run_file, folder) as seen:
            made = [put for kind in (False, True) for put in put_all(urls, puts // 2, conditional=kind)]
            _score_more(urls)
        shares = [_scraped(url, SCORED) for url in urls]
        kept = [
            _scraped(url, f"sao_reward_preference_keep_seconds_{what}") for what in ("sum", "count") for url in urls
        ]
    lines = (folder / "run" / "preferences" / "audit.jsonl").read_text().splitlines()
    found = judge(made, json.loads(seen.read_text()), shares, [json.loads(line) for line in lines])
    kept_s, syncs = sum(kept[: len(urls)]), sum(kept[len(urls) :])
    return {**found, "audit_writes": round(syncs), "ms_each": round(1000 * kept_s / syncs, 1)}


def _score_more(urls: Sequence[str]) -> None:
    """Wait until every replica has scored a few more: few PUTs are over before any scoring has begun after one."""
    before = [_scraped(url, SCORED) for url in urls]
    deadline = time.monotonic() + 60
    while any(_scraped(url, SCORED) < start + MORE for url, start in zip(urls, before, strict=True)):
        if time.monotonic() > deadline:
            msg = f"a replica has not scored {MORE} trajectories within 60 s of the last PUT"
            raise RuntimeError(msg)
        time.sleep(0.05)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[Sequence[RunConfig], Path]]:
    """A store and REPLICAS reward services in an empty folder; their configurations and one of their run files."""
    port = free_port()
    sets = ["run.name=puts", f'run.dir="{folder / "run"}"', f'redis.url="redis://127.0.0.1:{port}/0"']
    sets += ["task.name=writing", f"reward.batch={BATCH}"]
    own = [[f"reward.port={free_port()}", f"reward.consumer=reward-{number}"] for number in range(REPLICAS)]
    configs = [load_run_config(None, [*sets, *more], env={}) for more in own]
    command = valkey_command(configs[0].redis, port, folder / "valkey", folder / "valkey.log")
    with contextlib.ExitStack() as stack:
        stack.enter_context(server(command.argv, log=command.log, ready=lambda: answers(port), timeout_s=15))
        with redis.Redis(port=port) as client:
            claim(client, RunKeys("puts"))
        for number, config in enumerate(configs):
            path = folder / f"reward-{number}.toml"
            path.write_text(dump_run_config(config))
            stack.enter_context(
                service("services.reward", config.reward.port, config, path, folder / f"reward-{number}.log")
            )
        yield configs, folder / "reward-0.toml"


@contextlib.contextmanager
def traffic(run_file: Path, folder: Path) -> Iterator[Path]:
    """Full queues from here to the end of the block; where what was seen lies after it."""
    out = folder / "traffic.json"
    command = [sys.executable, "-m", "bench.preferences.traffic", str(run_file), str(out)]
    with (
        (folder / "traffic.log").open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "filled\n", (folder / "traffic.log").read_text()
            yield out
            process.stdin.close()
            assert process.wait(timeout=30) == 0, (folder / "traffic.log").read_text()
        finally:
            process.kill()


def put_all(urls: Sequence[str], puts: int, *, conditional: bool) -> list[Put]:
    """From CLIENTS at once, each at one of the replicas; `conditional`: under If-Match of what it has just read.

    Threads with http.client: a client that takes longer than the service would be measuring itself.
    """
    made: list[Put] = []
    left = iter(range(puts))
    one = threading.Lock()

    def work(number: int) -> None:
        client = http.client.HTTPConnection(urls[number % len(urls)].removeprefix("http://"), timeout=30)
        with contextlib.closing(client):
            _asked(client, "GET")
            while True:
                with one:
                    count = next(left, None)
                if count is None:
                    return
                if_match = _asked(client, "GET")[1]["version"] if conditional else None
                made.append(_put(client, count, if_match))

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(work, range(CLIENTS)))
    return made


def _put(client: http.client.HTTPConnection, count: int, if_match: int | None) -> Put:
    body = BODIES[count % len(BODIES)]
    headers = {"If-Match": f'"{if_match}"'} if if_match is not None else {}
    started = time.perf_counter()
    status, answer = _asked(client, "PUT", body, headers)
    seconds, answered_s = time.perf_counter() - started, time.time()
    return Put(if_match, status, answer["version"] if status == HTTPStatus.OK else 0, seconds, answered_s)


def _asked(
    client: http.client.HTTPConnection, method: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    client.request(method, URL, body, dict(headers or {}))
    response = client.getresponse()
    return response.status, json.loads(response.read())


def judge(
    puts: Sequence[Put], seen: dict[str, Any], shares: Sequence[float], lines: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Whether all that was promised held, and the numbers."""
    stored = sorted((put for put in puts if put.version), key=lambda put: put.version)
    winners = Counter(put.if_match for put in puts if put.if_match is not None and put.version)
    losers = [put for put in puts if not put.version]
    tried = {put.if_match for put in puts if put.if_match is not None}
    late = outdated(stored, [(start, version) for start, version in seen["scored"]])
    latencies = sorted(put.seconds for put in puts)
    in_time = sum(seen["started_s"] <= start <= seen["ended_s"] for start, _ in seen["scored"])
    rate = in_time / (seen["ended_s"] - seen["started_s"])
    found = {
        "puts": len(puts),
        "stored": len(stored),
        "gapless": [put.version for put in stored] == list(range(2, len(stored) + 2)),
        "refused_with_412": sum(put.status == HTTPStatus.PRECONDITION_FAILED for put in losers),
        "refused_otherwise": sum(put.status != HTTPStatus.PRECONDITION_FAILED for put in losers),
        "if_matches": len(tried),
        "if_matches_with_one_winner": sum(winners[one] == 1 for one in tried),
        "audit_is_gapless": [line["seq"] for line in lines] == list(range(1, len(stored) + 2)),
        "scored": len(seen["scored"]),
        "scored_by_replica": list(shares),
        "scored_per_s": round(rate, 1),
        "outcomes_that_are_no_reward": seen["others"],
        "shortest_queue": seen["shortest_queue"],
        "scorings_after_a_200": late[1],
        "of_these_under_an_older_version": late[0],
        "put_ms": {f"p{p}": round(1000 * quantile(latencies, p / 100), 1) for p in (50, 90, 99, 100)},
    }
    passed = (
        found["gapless"]
        and found["audit_is_gapless"]
        and found["refused_otherwise"] == found["outcomes_that_are_no_reward"] == late[0] == 0
        and found["if_matches_with_one_winner"] == found["if_matches"]
        and found["shortest_queue"] > REPLICAS * BATCH
        and min(shares) > 0
    )
    within = rate >= RATE and quantile(latencies, 0.99) <= P99_S
    return {**found, "correct": passed, "passed": passed and within}


def outdated(stored: Sequence[Put], scored: Sequence[tuple[float, int]]) -> tuple[int, int]:
    """Scorings that began after a 200 under a version older than that one's, and how many began after one at all."""
    answers_s = sorted((put.answered_s, put.version) for put in stored)
    newest, times, versions = 0, [], []
    for answered_s, version in answers_s:
        newest = max(newest, version)
        times.append(answered_s)
        versions.append(newest)
    wrong = after = 0
    for started_s, version in scored:
        place = bisect_left(times, started_s)
        after += place > 0
        wrong += place > 0 and version < versions[place - 1]
    return wrong, after


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least value that at least this share of them does not exceed."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def _scraped(url: str, metric: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    match = re.search(rf"^{re.escape(metric)} (\S+)$", text, re.MULTILINE)
    return float(match[1]) if match else 0.0
