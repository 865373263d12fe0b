"""Send the fuzzed requests of a range of seeds and judge each answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx

from bench.fuzz import messages, requests
from bench.fuzz.messages import Call
from bench.fuzz.world import TOKEN, World, services
from sao.tasks import load_task
from sao.v1 import ingest_pb2 as pb
from services.rollout.ingest_client import open_channel

AT_A_TIME = 24
WHOLE_EVERY = 100
"""Among the fuzzed messages a whole one goes out this often."""
SILENCE_S = 0.5
"""A server that waits for the rest of a request is left after this."""
_STORED = {pb.PUBLISH_STATUS_ACCEPTED, pb.PUBLISH_STATUS_DUPLICATE, pb.PUBLISH_STATUS_SUPERSEDED}


@dataclass(frozen=True)
class Answer:
    """What came back for one item."""

    code: grpc.StatusCode
    text: str
    status: pb.PublishStatus.ValueType = pb.PUBLISH_STATUS_UNSPECIFIED


@dataclass(frozen=True)
class Share:
    """Which seeds of each kind."""

    grpc: range
    rest: range


async def fuzz(share: Share, folder: Path, *, replay: bool) -> dict[str, Any]:
    """Counts by kind and answer, memory, and every problem found; `passed` when there is none."""
    started, counts = time.monotonic(), Counter[str]()
    async with services(folder, replay=replay) as world:
        async with open_channel(world.config) as channel:
            await _each(share.grpc, lambda seed: _message(world, channel, seed, counts))
            await _each(share.rest, _http(world, await _offered(world), counts))
            await _whole(world, channel, share.grpc.stop)
        await world.check()
        return {
            "passed": not world.problems,
            "problems": world.problems[:20],
            "counts": dict(sorted(counts.items())),
            "accepted": len(world.accepted),
            "growth_mib": world.growth_mib(),
            "seconds": round(time.monotonic() - started, 1),
        }


async def _each(seeds: Iterable[int], send: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """`send` for every seed, AT_A_TIME at a time."""
    waiting = iter(seeds)

    async def worker() -> None:
        for seed in waiting:
            await send(seed)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_A_TIME):
            group.create_task(worker())


# --- gRPC -----------------------------------------------------------------------------------------------------


async def _message(world: World, channel: grpc.aio.Channel, seed: int, counts: Counter[str]) -> None:
    if seed % WHOLE_EVERY == 0:
        await _whole(world, channel, seed)
    if seed % WHOLE_EVERY == 1:
        await _exchange(world.config.ingest.port, messages.raw(seed))
        counts["grpc bytes of other protocols"] += 1
        return
    call = messages.call(seed, world.limits)
    if call.stream:  # a message past gRPC's own limit ends the stream, as it must
        call = Call(**{**vars(call), "items": [item for item in call.items if len(item) <= world.limits.max_bytes]})
    answers = await _answers(channel, call)
    for problem in _judged(world, call, answers, counts):
        world.problems.append(f"seed {seed} ({call.kind}, {call.path}): {problem}")


async def _whole(world: World, channel: grpc.aio.Channel, seed: int) -> None:
    data = messages.whole(random.Random(f"whole {seed}"), world.limits).SerializeToString()
    call = Call(seed, "whole", f"{messages.SERVICE}/Publish", [data])
    (answer,) = await _answers(channel, call)
    if answer.status not in _STORED:
        world.problems.append(f"a whole message after seed {seed} got {answer}")
    _note(world, data, answer)


async def _answers(channel: grpc.aio.Channel, call: Call) -> list[Answer]:
    """One for each item, unless the conversation broke off."""
    metadata = (("authorization", f"Bearer {call.token}"),) if call.token is not None else ()
    options: dict[str, Any] = {"timeout": call.timeout_s, "metadata": metadata}
    found: list[Answer] = []
    try:
        if call.stream:
            method: Any = channel.stream_stream(call.path, _same, pb.PublishStreamResponse.FromString)
            async for one in method(iter(call.items), **options):
                found.append(_item(one))  # noqa: PERF401 - what came before an error counts
            return found
        data = await channel.unary_unary(call.path, _same, _same)(call.items[0], **options)
    except grpc.aio.AioRpcError as error:
        return [*found, Answer(error.code(), error.details() or "")]
    status = pb.PublishResponse.FromString(data).status if call.path.endswith("/Publish") else 0
    return [Answer(grpc.StatusCode.OK, "", status)]  # type: ignore[arg-type]  # 0 is the unspecified one


def _same(data: bytes) -> bytes:
    return data


def _item(response: pb.PublishStreamResponse) -> Answer:
    code = next(code for code in grpc.StatusCode if code.value[0] == response.error.code)
    return Answer(code, response.error.message, response.status)


def _judged(world: World, call: Call, answers: Sequence[Answer], counts: Counter[str]) -> list[str]:
    """What is wrong with these answers; counts the messages that the service had to refuse, and the others."""
    if call.kind in {"stranger", "nowhere", "hasty"}:
        expected = {"stranger": ["UNAUTHENTICATED"], "nowhere": ["UNIMPLEMENTED"]}.get(
            call.kind, ["INVALID_ARGUMENT", "DEADLINE_EXCEEDED"]
        )
        counts["grpc malformed"] += 1
        return [f"expected {expected}, got {answer}" for answer in answers if answer.code.name not in expected]
    if call.kind in {"LeasePrompts", "RenewLeases"}:
        counts[f"grpc {'taken' if answers[0].code is grpc.StatusCode.OK else 'malformed'}"] += 1
        return [f"got {answer}" for answer in answers if answer.code.name not in {"OK", "INVALID_ARGUMENT"}]
    if len(answers) != len(call.items):
        return [f"{len(call.items)} items, {len(answers)} answers; the last {answers[-1:]}"]
    problems = []
    for data, answer in zip(call.items, answers, strict=True):
        _note(world, data, answer)
        fault = "size" if len(data) > 2 * world.limits.max_bytes else messages.fault(data, world.limits)
        counts["grpc malformed" if fault else "grpc taken"] += 1
        if fault:
            counts[f"grpc fault {fault}"] += 1
        if not _fits(fault, answer):
            problems.append(f"fault {fault!r} got {answer}")
    return problems


def _fits(fault: str, answer: Answer) -> bool:
    match fault:
        case "":
            return answer.status in _STORED
        case "age":
            return answer.code is grpc.StatusCode.FAILED_PRECONDITION
        case "size":
            return answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in answer.text
        case "undecodable":
            return answer.code is grpc.StatusCode.INVALID_ARGUMENT and "no request of this method" in answer.text
    return answer.code is grpc.StatusCode.INVALID_ARGUMENT and f"{fault}: " in answer.text


def _note(world: World, data: bytes, answer: Answer) -> None:
    if answer.status == pb.PUBLISH_STATUS_ACCEPTED:
        world.accepted.add(messages.trajectory_id(data))


# --- HTTP -----------------------------------------------------------------------------------------------------


async def _offered(world: World) -> dict[str, list[requests.Route]]:
    """The routes of the REST services, from their own OpenAPI documents."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        return {
            name: requests.routes_of((await client.get(f"http://127.0.0.1:{world.ports[name]}/openapi.json")).json())
            for name in ("reward", "weights")
        }


def _http(
    world: World, routes: dict[str, list[requests.Route]], counts: Counter[str]
) -> Callable[[int], Coroutine[Any, Any, None]]:
    components = sorted(load_task(world.config.task.name).components)

    async def send(seed: int) -> None:
        name = "reward" if seed % 3 else "weights"
        kind, data = requests.request(seed, routes[name], components)
        answer = await _exchange(world.ports[name], data)
        statuses = [int(code) for code in re.findall(rb"^HTTP/1\.[01] (\d{3})", answer, re.MULTILINE)]
        counts[f"rest {statuses[0] // 100}xx" if statuses else "rest without an answer"] += 1
        if any(status >= 500 for status in statuses):
            world.problems.append(f"seed {seed} ({kind}) to {name}: {data[:300]!r} got {answer[:500]!r}")

    return send


async def _exchange(port: int, data: bytes) -> bytes:
    """Write `data`, read until the server closes or falls silent, and hang up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = bytearray()
    with contextlib.suppress(ConnectionError, TimeoutError):
        writer.write(data)
        await asyncio.wait_for(writer.drain(), SILENCE_S)
        while block := await asyncio.wait_for(reader.read(65_536), SILENCE_S):
            answer += block
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return bytes(answer)
