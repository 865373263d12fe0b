"""Feed a real reward service whose judge fails and stalls, and compare what it counted with what was injected.

| part | the run file | the preference |
|---|---|---|
| absent | no judge | reads the task's components |
| unread | the unreliable judge | reads the task's components |
| read | the unreliable judge | reads the judge too |

Every part is a run of its own on one Valkey, fed at the same fixed rate. In `read` the task's components of every
trajectory have been computed for the first time when the judge has been asked about every one: both begin together.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import redis

import sao.streams
from bench.judge.server import Call, Fate, LoopbackServer, UnreliableJudge
from sao.config import RunConfig, dump_run_config, load_run_config
from sao.outcome import OUTCOME, RewardOutcome, Scored
from sao.preference import PreferenceDocument
from sao.redis_client import RunKeys
from sao.streams.base import DeadLetter, Delivery, StreamName, TrajectoryStreams
from sao.tasks.base import Prompt
from sao.tasks.tiny_tokenizer import tokenizer_of_run
from sao.tasks.writing import LEXICONS, Writing
from sao.trajectory import Trajectory
from tests.support.processes import free_port
from tests.support.rollouts import play
from tests.support.services import service
from tests.support.stores import claim
from tests.support.valkey import valkey
from tests.support.waiting import eventually

TASK = Writing()
TOKENIZER = tokenizer_of_run(None, TASK)
JUDGE, COMPONENT = "critic", "humour"
FAIL, SLOW = 0.30, 0.10
SEED = 20260801
PLAIN = TASK.default_preference
JUDGED = PreferenceDocument(
    name="funny and cute", weights={COMPONENT: 0.5, "style_cute": 0.5}, rubric="Puns are not funny."
)


@dataclass(frozen=True)
class Load:
    """How much, how fast, and how patient the service is."""

    trajectories: int
    per_second: float
    deadline_s: float
    """Of one call of the judge."""
    claim_idle_s: float
    max_deliveries: int
    concurrency: int = 256
    """Calls of the judge at a time: a stalled one keeps its place until its deadline."""


@dataclass(frozen=True)
class Part:
    """What one part came to."""

    seconds: float
    """From the first trajectory to the last whose task components were computed for the first time."""
    counted: dict[str, dict[str, float]]
    """Outcomes by scorer and kind, as the service counts them."""
    task_seconds: float
    """Mean of what the service measured for the task's own scorer."""
    cpu_seconds: float
    """That the service used in all."""
    outcomes: dict[str, RewardOutcome]
    dead: list[DeadLetter]
    calls: Sequence[Call]

    @property
    def per_second(self) -> float:
        return len({*self.outcomes, *(letter.trajectory_id for letter in self.dead)}) / self.seconds


@contextlib.asynccontextmanager
async def _running(config: RunConfig, folder: Path) -> AsyncIterator[TrajectoryStreams]:
    path = folder / "run.toml"
    path.write_text(dump_run_config(config))
    with redis.Redis.from_url(config.redis.url) as client:
        claim(client, RunKeys(config.run.name))
    streams = sao.streams.connect(config)
    await streams.open_consumer(StreamName.SCORED, "trainer")
    try:
        with service("services.reward", config.reward.port, config, path, folder / "reward.log"):
            yield streams
    finally:
        await streams.close()


def _config(folder: Path, store: str, load: Load, preference: PreferenceDocument, judge_url: str | None) -> RunConfig:
    sets = [
        f"run.name={folder.name}",
        f'run.dir="{folder / "run"}"',
        f'redis.url="{store}"',
        "task.name=writing",
        f"reward.port={free_port()}",
        f"reward.claim_idle_s={load.claim_idle_s}",
        f"reward.max_deliveries={load.max_deliveries}",
    ]
    if judge_url is not None:
        judge = {
            "kind": "judge",
            "url": f"{judge_url}/v1",
            "model": "unreliable",
            "retries": 0,
            "deadline_s": load.deadline_s,
            "concurrency": load.concurrency,
        }
        sets += [f"reward.scorers.{JUDGE}.{key}={value}" for key, value in judge.items()]
        sets.append(f'reward.scorers.{JUDGE}.components={{ {COMPONENT} = "How funny it is" }}')
    config = load_run_config(None, sets, env={})
    folder.mkdir(parents=True)
    return config.model_copy(update={"preference": preference})


async def part(folder: Path, store: str, load: Load, preference: PreferenceDocument, *, judge: bool) -> Part:
    """Run one part in `folder` until everything is scored or dead."""
    unreliable = UnreliableJudge(COMPONENT, seed=SEED, fail=FAIL, slow=SLOW)
    async with LoopbackServer(unreliable) as server:
        config = _config(folder, store, load, preference, server.url if judge else None)
        async with _running(config, folder) as streams:
            begun_s = time.monotonic()
            feeding = asyncio.ensure_future(_feed(streams, load))
            if judge and COMPONENT in preference.components:
                await eventually(
                    lambda: len({call.trajectory_id for call in unreliable.calls}) == load.trajectories,
                    what="the judge to be asked about all of them",
                    timeout_s=600,
                )
                first_pass_s = max(_first_asked(unreliable.calls).values()) - begun_s
            await feeding
            found = await _ended(streams, load)
            seconds = first_pass_s if unreliable.calls else time.monotonic() - begun_s
            text = await _metrics(config)
            dead = await streams.dead_letters(count=load.trajectories)
    outcomes = {one.trajectory_id: OUTCOME.validate_json(one.fields["outcome"]) for one in found}
    return Part(seconds, counted(text), _task_seconds(text), _cpu_seconds(text), outcomes, dead, unreliable.calls)


def _first_asked(calls: Sequence[Call]) -> dict[str, float]:
    return {call.trajectory_id: call.at_s for call in reversed(calls)}


async def _feed(streams: TrajectoryStreams, load: Load) -> None:
    """One trajectory after the other, each at its time: a service that lags does not slow the feed."""
    begun_s = time.monotonic()
    for ordinal in range(load.trajectories):
        await asyncio.sleep(max(begun_s + ordinal / load.per_second - time.monotonic(), 0))
        made = _trajectory(ordinal)
        fields = {"task": TASK.name, "ordinal": str(ordinal)}
        await streams.append(made.id, made.message.SerializeToString(), ordinal=ordinal, sample=0, fields=fields)


def _trajectory(ordinal: int) -> Trajectory:
    words = [LEXICONS[style][(ordinal + i) % 16] for i, style in enumerate([*LEXICONS, *LEXICONS, *LEXICONS])]
    return play(TASK, Prompt("p", "moon", {}), TOKENIZER, [" ".join([*words, "<eos>"])])


async def _ended(streams: TrajectoryStreams, load: Load) -> list[Delivery]:
    """What was scored, once every trajectory is that or dead."""
    found: list[Delivery] = []
    deadline_s = time.monotonic() + 600
    while len(found) + len(await streams.dead_letters(count=load.trajectories)) < load.trajectories:
        if time.monotonic() > deadline_s:
            msg = f"{len(found)} of {load.trajectories} trajectories were scored in 600 s"
            raise AssertionError(msg)
        found += await streams.read(StreamName.SCORED, "trainer", count=256, block_ms=50)
    return found


async def _metrics(config: RunConfig) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{config.reward.port}/metrics", timeout=10)).text


def counted(metrics: str) -> dict[str, dict[str, float]]:
    """Outcomes by scorer and kind."""
    pattern = r'^sao_reward_component_outcomes_total\{component="([^"]+)",kind="([^"]+)"\} (\S+)$'
    found: dict[str, dict[str, float]] = {}
    for scorer, kind, value in re.findall(pattern, metrics, re.MULTILINE):
        found.setdefault(scorer, {})[kind] = float(value)
    return found


def _task_seconds(metrics: str) -> float:
    name = r'^sao_reward_component_seconds_%s\{component="score"\} (\S+)$'
    total, count = (float(re.findall(name % part, metrics, re.MULTILINE)[0]) for part in ("sum", "count"))
    return total / count


def _cpu_seconds(metrics: str) -> float:
    return float(re.findall(r"^process_cpu_seconds_total (\S+)$", metrics, re.MULTILINE)[0])


# --- the judgement ---------------------------------------------------------------------------------------------


def untruths(read: Part) -> list[str]:
    """What the service made of the judge's calls that is not what was injected; empty when all of it is."""
    injected = Counter(call.fate.kind for call in read.calls)
    seen = {kind: int(count) for kind, count in read.counted.get(JUDGE, {}).items() if count}
    found = [] if seen == injected else [f"counted {seen}, injected {dict(injected)}"]
    by_id: dict[str, list[Call]] = {}
    for call in read.calls:
        by_id.setdefault(call.trajectory_id, []).append(call)
    honest = UnreliableJudge(COMPONENT, seed=SEED, fail=FAIL, slow=SLOW).honest
    for trajectory_id, outcome in read.outcomes.items():
        right = isinstance(outcome, Scored) and outcome.components[COMPONENT] == honest(trajectory_id) > 0
        if not right or by_id[trajectory_id][-1].fate is not Fate.HONEST:
            found.append(f"{trajectory_id} was scored as {outcome}, its calls were {by_id[trajectory_id]}")
    for letter in read.dead:
        calls = by_id[letter.trajectory_id]
        if any(call.fate is Fate.HONEST for call in calls) or letter.kind != calls[-1].fate.kind:
            found.append(f"{letter.trajectory_id} is dead of {letter.reason!r}, its calls were {calls}")
    return found


def shares(read: Part) -> dict[str, float]:
    """Of the judge's calls, by what was done to them."""
    fates = Counter(call.fate.value for call in read.calls)
    return {fate: round(count / len(read.calls), 4) for fate, count in sorted(fates.items())}


PROOF = Load(trajectories=1500, per_second=50, deadline_s=2.0, claim_idle_s=4.5, max_deliveries=5)
LEAST_SHARE = 0.95
"""Of the throughput without a judge: what less is not noise any more."""


async def prove(folder: Path, load: Load = PROOF) -> dict[str, Any]:
    """The three parts, and whether they are as they must be."""
    (folder / "valkey").mkdir(parents=True)
    with valkey(folder / "valkey") as store:
        absent = await part(folder / "absent", store, load, PLAIN, judge=False)
        unread = await part(folder / "unread", store, load, PLAIN, judge=True)
        read = await part(folder / "read", store, load, JUDGED, judge=True)
    wrong = untruths(read)
    zeros = sum(isinstance(one, Scored) and one.components[COMPONENT] == 0 for one in read.outcomes.values())
    unread_share, read_share = (one.per_second / absent.per_second for one in (unread, read))
    return {
        "passed": not wrong and not zeros and not unread.calls and min(unread_share, read_share) >= LEAST_SHARE,
        "trajectories": load.trajectories,
        "offered_per_s": load.per_second,
        "judge_calls": len(read.calls),
        "injected": shares(read),
        "injected_by_outcome": dict(Counter(call.fate.kind for call in read.calls)),
        "counted_by_outcome": {kind: int(count) for kind, count in read.counted[JUDGE].items()},
        "fake_zeros": zeros,
        "scored": len(read.outcomes),
        "dead": dict(Counter(letter.kind for letter in read.dead)),
        "untruths": wrong[:10],
        "task_components_per_s": {
            "absent": round(absent.per_second, 2),
            "unread": round(unread.per_second, 2),
            "read": round(read.per_second, 2),
        },
        "share_of_absent": {"unread": round(unread_share, 4), "read": round(read_share, 4)},
        "cpu_ms_per_trajectory": {
            name: round(1000 * one.cpu_seconds / load.trajectories, 2)
            for name, one in (("absent", absent), ("unread", unread), ("read", read))
        },
        "task_scorer_seconds": {
            "absent": round(absent.task_seconds, 6),
            "unread": round(unread.task_seconds, 6),
            "read": round(read.task_seconds, 6),
        },
    }
