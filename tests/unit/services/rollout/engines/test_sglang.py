"""What only a wire can do wrong, on scripted answers in the shapes a real server gives (docs/engine.md, 2.1)."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import Any
from uuid import uuid4

import httpx
import pytest

from sao.routing import RoutingShape
from services.rollout.engines.base import (
    EngineAbortedError,
    EngineError,
    EngineOutputError,
    EngineRefusedError,
    EngineUnavailableError,
    Finish,
    Span,
    StaleCacheError,
    Turn,
)
from services.rollout.engines.sglang import SGLangEngine, error_text

GOOD: dict[str, Any] = {
    "text": "ab",
    "output_ids": [5, 6, 2],
    "meta_info": {
        "id": "x",
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-1.0, 5, None], [-0.5, 6, None], [0.0, 2, None]],
        "weight_versions": [{"version": "v1", "start": 0, "end": 2}, {"version": "v2", "start": 2, "end": 3}],
    },
}


def with_meta(**changes: object) -> dict[str, Any]:
    return GOOD | {"meta_info": GOOD["meta_info"] | changes}


async def ask(
    answer: httpx.Response | httpx.TransportError,
    requests: list[httpx.Request] | None = None,
    routing: RoutingShape | None = None,
    cache_salt: str = "",
) -> Turn:
    def respond(request: httpx.Request) -> httpx.Response:
        if requests is not None:
            requests.append(request)
        if isinstance(answer, httpx.TransportError):
            raise answer
        return answer

    transport = httpx.MockTransport(respond)
    engine = SGLangEngine("engine-0", "http://engine/", 32, routing=routing, transport=transport, api_key="secret")
    try:
        return await engine.generate(
            [1, 8],
            max_new_tokens=4,
            stop_token_ids=[2],
            rid="r" * 32,
            timeout_s=5.0,
            routes_from=1,
            cache_salt=cache_salt,
        )
    finally:
        await engine.close()


async def test_a_turn_is_read_whole() -> None:
    turn = await ask(httpx.Response(200, json=GOOD))
    assert (turn.token_ids, turn.logprobs, turn.finish) == ([5, 6, 2], [-1.0, -0.5, 0.0], Finish.STOP)
    assert turn.spans == [Span("v1", 0, 2), Span("v2", 2, 3)]


async def test_the_request_samples_the_whole_distribution_without_a_seed() -> None:
    requests: list[httpx.Request] = []
    await ask(httpx.Response(200, json=GOOD), requests)
    body = json.loads(requests[0].content)
    assert body["input_ids"] == [1, 8]
    assert body["return_logprob"] is True
    sampling = body["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (1.0, 1.0, -1)
    assert "sampling_seed" not in sampling
    assert "ignore_eos" not in sampling, "it would switch stop_token_ids off"
    assert "return_routed_experts" not in body
    assert requests[0].headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize(("salt", "sent"), [("", {}), ("v1", {"extra_key": "v1"})])
async def test_a_salt_names_the_part_of_the_cache(salt: str, sent: dict[str, str]) -> None:
    requests: list[httpx.Request] = []
    await ask(httpx.Response(200, json=with_meta(cached_tokens=1)), requests, cache_salt=salt)
    assert {key: value for key, value in json.loads(requests[0].content).items() if key == "extra_key"} == sent


@pytest.mark.parametrize("cached", [1, None])
async def test_a_prefix_of_another_version_than_the_first_sampler_is_an_error(cached: int | None) -> None:
    with pytest.raises(StaleCacheError, match="sampled by v1 from a prefix cached under v0"):
        await ask(httpx.Response(200, json=with_meta(cached_tokens=cached)), cache_salt="v0")
    assert (await ask(httpx.Response(200, json=with_meta(cached_tokens=0)), cache_salt="v0")).spans[0].version == "v1"


ROUTING = RoutingShape(layers=2, experts=4, per_token=1)


def encoded(*ids: int) -> str:
    return base64.b64encode(struct.pack(f"<{len(ids)}i", *ids)).decode()


async def test_routes_are_asked_from_the_first_unknown_token_and_read_as_bytes() -> None:
    requests: list[httpx.Request] = []
    answer = httpx.Response(200, json=with_meta(routed_experts=encoded(0, 1, 2, 3, 1, 0)))
    turn = await ask(answer, requests, ROUTING)
    assert turn.routed_experts == bytes([0, 1, 2, 3, 1, 0])
    body = json.loads(requests[0].content)
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 1)


@pytest.mark.parametrize(
    ("routes", "text"),
    [
        (None, "start the server with --enable-return-routed-experts"),
        ("no base64!", "no base64"),
        (encoded(0, 1, 2, 3), "4 bytes, expected 6"),
        (encoded(0, 1, 2, 3, 1, 4), "holds expert 4, expected ids below 4"),
        (encoded(0, 1, 2, 3, 1, -1), "outside 0..255"),
        (encoded(0, 1, 2, 3, 1, 256), "outside 0..255"),
        (encoded(0, 1, 2, 3, 1, 255), "expected an expert for every token"),
    ],
)
async def test_routes_that_can_not_be_replayed_are_an_error(routes: str | None, text: str) -> None:
    with pytest.raises(EngineOutputError, match=text):
        await ask(httpx.Response(200, json=with_meta(routed_experts=routes)), routing=ROUTING)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), EngineRefusedError, "too long"),
        (httpx.Response(400, json={"error": "unknown field x"}), EngineRefusedError, "unknown field x"),
        (httpx.Response(400, json={"object": "error", "message": "bad type"}), EngineRefusedError, "bad type"),
        (httpx.Response(401, json={"error": "Unauthorized"}), EngineRefusedError, "Unauthorized"),
        (httpx.Response(503, json={"message": "The request queue is full."}), EngineUnavailableError, "queue is full"),
        (httpx.Response(502, text="<html>"), EngineUnavailableError, "<html>"),
        (httpx.ConnectError("refused"), EngineUnavailableError, "refused"),
        (httpx.ReadError("reset"), EngineUnavailableError, "reset"),
    ],
)
async def test_every_error_shape_is_read(
    answer: httpx.Response | httpx.TransportError, error: type[EngineError], text: str
) -> None:
    with pytest.raises(error, match=text):
        await ask(answer)


@pytest.mark.parametrize(
    "meta",
    [
        {"finish_reason": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}},
        {
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "output_token_logprobs": [],
            "weight_versions": [],
        },
    ],
)
async def test_an_abort_arrives_as_success_and_is_an_error(meta: dict[str, object]) -> None:
    with pytest.raises(EngineAbortedError, match="Abort"):
        await ask(httpx.Response(200, json=with_meta(**meta)))


async def test_an_abort_in_the_queue_has_a_poor_answer() -> None:
    poor = {"text": "", "meta_info": {"id": "x", "finish_reason": {"type": "abort", "message": "waiting"}}}
    with pytest.raises(EngineAbortedError, match="waiting"):
        await ask(httpx.Response(200, json=poor))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (with_meta(output_token_logprobs=[[None, 5, None], [None, 6, None], [None, 2, None]]), "NaN"),
        (with_meta(output_token_logprobs=[[-1.0, 5, None]]), "other ids"),
        (with_meta(output_token_logprobs=[]), "other ids"),
        (with_meta(weight_versions=[]), "cover 0 of 3"),
        (with_meta(weight_versions=[{"version": "v1", "start": 0, "end": 2}]), "cover 2 of 3"),
        (with_meta(weight_versions=[{"version": "", "start": 0, "end": 3}]), "expected contiguous"),
        (with_meta(finish_reason=None), "finish_reason"),
        (with_meta(finish_reason={"type": "novel"}), "novel"),
        ({"output_ids": [1]}, "not what /generate gives"),
        ([GOOD], "not what /generate gives"),
        (with_meta(output_token_logprobs=[[-1, 99, None]]) | {"output_ids": [99]}, "expected 0 <= id < 32"),
    ],
)
async def test_an_answer_that_can_not_be_trained_on_is_an_error(answer: object, text: str) -> None:
    with pytest.raises(EngineOutputError, match=text):
        await ask(httpx.Response(200, json=answer))


async def test_a_turn_given_up_is_aborted_on_the_server() -> None:
    paths: list[str] = []

    async def respond(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        if request.url.path == "/generate":
            await asyncio.Event().wait()
        return httpx.Response(200)

    engine = SGLangEngine("engine-0", "http://engine", 32, transport=httpx.MockTransport(respond))
    with pytest.raises(EngineError, match="no answer"):
        await engine.generate([1], max_new_tokens=1, stop_token_ids=[], rid=uuid4().hex, timeout_s=0.01)
    assert paths == ["/generate", "/abort_request"]


def test_plain_text_is_an_error_text_too() -> None:
    assert error_text(httpx.Response(400, text="Flush cache failed.")) == "Flush cache failed."
    assert error_text(httpx.Response(400, json=["odd"])) == "['odd']"


async def test_a_body_that_cannot_be_decoded_means_unavailable() -> None:
    broken = httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip"))
    with pytest.raises(EngineUnavailableError, match="DecodingError"):
        await ask(broken)
