"""The engine contract, on the in-memory twin and on a real SGLang server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol
from uuid import uuid4

import httpx
import pytest

from sao.routing import RoutingShape
from services.rollout.engines.base import (
    Engine,
    EngineAbortedError,
    EngineRefusedError,
    EngineTimeoutError,
    Finish,
    Turn,
)
from services.rollout.engines.memory import MemoryEngine
from services.rollout.engines.sglang import SGLangEngine
from tests.support.engine import EngineServer
from tests.support.waiting import eventually

VOCAB = 32
ROUTING = RoutingShape(layers=2, experts=4, per_token=2)
"""Of tests/support/tiny_checkpoint.py."""
PROMPT = [1, 8, 9, 10]


class Rig(Protocol):
    """An engine, and what only a test does to it."""

    engine: Engine
    """Gives the routes of the model below with each turn."""
    unrouted: Engine
    """The same server, asked for none."""
    launched: str
    """The version it starts with."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def set_version(self, version: str) -> None: ...

    async def abort_running(self) -> None:
        """Give up every turn in flight, once there is one; turns are slow enough for that."""

    async def answers(self) -> bool:
        """Whether the server is still there."""


class MemoryRig:
    def __init__(self) -> None:
        self.launched = "initial"
        self.twin = MemoryEngine("engine-0", VOCAB, version=self.launched, routing=ROUTING)
        self.engine: Engine = self.twin
        self.unrouted: Engine = MemoryEngine("engine-0", VOCAB, version=self.launched)

    async def pause(self) -> None:
        self.twin.pause()

    async def resume(self) -> None:
        self.twin.resume()

    async def set_version(self, version: str) -> None:
        self.twin.version = version

    async def abort_running(self) -> None:
        await eventually(lambda: bool(self.twin.running), what="a turn in flight")
        for rid in list(self.twin.running):
            self.twin.abort(rid)

    async def answers(self) -> bool:
        return True


class SGLangRig:
    def __init__(self, url: str, launched: str, http: httpx.AsyncClient) -> None:
        self.launched = launched
        self.engine: Engine = SGLangEngine("engine-0", url, VOCAB, routing=ROUTING)
        self.unrouted: Engine = SGLangEngine("engine-0", url, VOCAB)
        self._http = http

    async def _post(self, path: str, **body: object) -> None:
        (await self._http.post(path, json=body)).raise_for_status()

    async def pause(self) -> None:
        await self._post("/pause_generation", mode="retract")

    async def resume(self) -> None:
        await self._post("/continue_generation")

    async def set_version(self, version: str) -> None:
        await self._post("/update_weight_version", new_version=version, abort_all_requests=False)

    async def abort_running(self) -> None:
        await self._post("/slow_down", forward_sleep_time=0.1)
        try:
            await eventually(self._running, what="a turn in flight")
            await self._post("/abort_request", abort_all=True)
        finally:
            await self._post("/slow_down", forward_sleep_time=None)

    async def _running(self) -> bool:
        loads = (await self._http.get("/v1/loads")).json()["loads"]
        return any(load["num_running_reqs"] > 0 for load in loads)

    async def answers(self) -> bool:
        return (await self._http.get("/model_info")).status_code == httpx.codes.OK


@contextlib.asynccontextmanager
async def sglang_rig(url: str) -> AsyncIterator[SGLangRig]:
    async with httpx.AsyncClient(base_url=url, timeout=30.0) as http:
        launched = (await http.get("/model_info")).json()["weight_version"]
        rig = SGLangRig(url, launched, http)
        try:
            yield rig
        finally:
            await rig.resume()
            await rig.set_version(launched)
            await rig.engine.close()
            await rig.unrouted.close()


@pytest.fixture(params=["memory", pytest.param("sglang", marks=[pytest.mark.engine, pytest.mark.timeout(400)])])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    if request.param == "memory":
        yield MemoryRig()
        return
    server: EngineServer = request.getfixturevalue("sglang_engine")
    async with sglang_rig(server.url) as real:
        yield real


async def generate(
    rig: Rig,
    prompt: list[int] = PROMPT,
    *,
    new: int = 16,
    stops: list[int] | None = None,
    rid: str | None = None,
    timeout_s: float = 60.0,
    routes_from: int = 0,
) -> Turn:
    return await rig.engine.generate(
        prompt,
        max_new_tokens=new,
        stop_token_ids=stops or [],
        rid=rid or uuid4().hex,
        timeout_s=timeout_s,
        routes_from=routes_from,
    )


def check(turn: Turn, version: str) -> None:
    count = len(turn.token_ids)
    assert all(0 <= token < VOCAB for token in turn.token_ids)
    assert len(turn.logprobs) == count
    assert all(value <= 1e-5 for value in turn.logprobs)
    assert [(span.version, span.start, span.end) for span in turn.spans] == [(version, 0, count)]
    assert turn.engine_s > 0


async def test_a_turn_is_whole_and_names_its_version(rig: Rig) -> None:
    await rig.set_version("v00000007")
    check(await generate(rig), "v00000007")


async def test_routes_cover_prompt_and_answer_but_for_the_last_token(rig: Rig) -> None:
    turn = await generate(rig)
    assert ROUTING.problem(turn.routed_experts, len(PROMPT) + len(turn.token_ids) - 1) == ""
    pairs = zip(turn.routed_experts[::2], turn.routed_experts[1::2], strict=True)
    assert all(one != other for one, other in pairs), "a token goes to different experts"
    prompt = (len(PROMPT) - 1) * ROUTING.row_bytes
    again = await generate(rig)  # its prefix is cached by now
    assert again.routed_experts[:prompt] == turn.routed_experts[:prompt]


async def test_routes_that_are_known_already_are_left_out(rig: Rig) -> None:
    first = await generate(rig, new=4)
    ids = [*PROMPT, *first.token_ids, 9, 10]
    known = len(PROMPT) + len(first.token_ids) - 1
    rest = await generate(rig, ids, new=1, routes_from=known)
    whole = await generate(rig, ids, new=1)
    assert ROUTING.problem(rest.routed_experts, len(ids) - known) == ""
    assert first.routed_experts + rest.routed_experts == whole.routed_experts


async def test_an_engine_that_was_not_made_for_routes_gives_none(rig: Rig) -> None:
    turn = await rig.unrouted.generate(PROMPT, max_new_tokens=2, stop_token_ids=[], rid=uuid4().hex, timeout_s=60)
    assert turn.routed_experts == b""


async def test_the_first_stop_token_ends_the_turn_and_belongs_to_it(rig: Rig) -> None:
    everything = list(range(VOCAB))
    turn = await generate(rig, stops=everything)
    assert turn.finish is Finish.STOP
    assert len(turn.token_ids) == 1


async def test_a_turn_without_stop_ends_at_its_length(rig: Rig) -> None:
    turns = await asyncio.gather(*(generate(rig, new=3) for _ in range(16)))
    for turn in turns:
        stopped = turn.finish is Finish.STOP  # the model's own end-of-sequence token
        assert stopped or len(turn.token_ids) == 3
    assert any(turn.finish is Finish.LENGTH for turn in turns)


async def test_concurrent_turns_are_drawn_independently(rig: Rig) -> None:
    turns = await asyncio.gather(*(generate(rig) for _ in range(16)))
    assert len({tuple(turn.token_ids) for turn in turns}) > 1


@pytest.mark.parametrize("prompt", [[], [1, VOCAB], [1, -1], [2**31]])
async def test_a_bad_prompt_is_refused_before_it_can_end_the_server(rig: Rig, prompt: list[int]) -> None:
    with pytest.raises(EngineRefusedError, match="expected"):
        await generate(rig, prompt)
    assert await rig.answers()
    check(await generate(rig), rig.launched)


async def test_a_deadline_ends_a_turn_that_the_engine_holds(rig: Rig) -> None:
    await rig.pause()
    with pytest.raises(EngineTimeoutError, match=r"within 0\.2 s"):
        await generate(rig, timeout_s=0.2)
    await rig.resume()
    check(await generate(rig), rig.launched)


async def test_a_turn_across_a_version_change_says_which_tokens_are_whose(rig: Rig) -> None:
    await rig.pause()
    turn = asyncio.create_task(generate(rig))
    await asyncio.sleep(0)
    await rig.set_version("v00000008")
    await rig.resume()
    result = await turn
    assert result.versions == {"v00000008"}
    assert result.spans[-1].end == len(result.token_ids)


async def test_an_id_in_flight_twice_is_refused(rig: Rig) -> None:
    rid = uuid4().hex
    await rig.pause()
    first = asyncio.create_task(generate(rig, rid=rid))
    second = asyncio.create_task(generate(rig, rid=rid))
    done, _ = await asyncio.wait([first, second], timeout=20, return_when=asyncio.FIRST_COMPLETED)
    await rig.resume()
    assert isinstance(done.pop().exception(), EngineRefusedError)
    results = await asyncio.gather(first, second, return_exceptions=True)
    assert sum(isinstance(result, Turn) for result in results) == 1


async def test_an_aborted_turn_is_an_error_whatever_it_had_sampled(rig: Rig) -> None:
    turns = [asyncio.create_task(generate(rig, new=200)) for _ in range(16)]
    await rig.abort_running()
    results = await asyncio.gather(*turns, return_exceptions=True)
    assert any(isinstance(result, EngineAbortedError) for result in results)
    assert all(isinstance(result, EngineAbortedError | Turn) for result in results)
