"""The SGLang client: keys, error shapes, deadlines, and answers that can't be used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.weights.engines.base import (
    EngineRefusedError,
    EngineUnreachableError,
    PauseMode,
    UnusableAnswerError,
    UpdatedButNotFlushedError,
)
from services.weights.engines.sglang import SGLangEngine

Handler = Callable[[httpx.Request], httpx.Response]


def engine(handler: Handler, **keys: str) -> SGLangEngine:
    return SGLangEngine("engine-0", "http://engine/", deadline_s=0.5, transport=httpx.MockTransport(handler), **keys)


def scored(*rows: tuple[float | None, int]) -> httpx.Response:
    return httpx.Response(200, json=[{"meta_info": {"input_token_logprobs": [[*row, None] for row in rows]}}])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "too long"}}, "too long"),
        ({"error": "unknown field 'x'"}, "unknown field 'x'"),
        ({"object": "error", "message": "bad json", "code": 400}, "bad json"),
        ({"success": False, "message": "Failed to get config"}, "Failed to get config"),
        ("Flush cache failed.", "Flush cache failed."),
    ],
)
async def test_every_error_shape_is_read(body: Any, text: str) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    with pytest.raises(EngineRefusedError) as caught:
        await engine(lambda _: httpx.Response(400, content=content)).flush()
    assert caught.value.text == text
    assert caught.value.status == 400
    assert "engine-0" in str(caught.value)


async def test_updated_but_not_flushed_is_its_own_error() -> None:
    message = "Weights were updated, but the cache was not flushed because requests are running."
    answer = httpx.Response(400, json={"success": False, "message": message})
    with pytest.raises(UpdatedButNotFlushedError):
        await engine(lambda _: answer).load(Path("/v"), "v00000001")


async def test_success_false_is_a_refusal_whatever_the_status() -> None:
    with pytest.raises(EngineRefusedError, match="nothing done"):
        await engine(lambda _: httpx.Response(200, json={"success": False, "message": "nothing done"})).load(
            Path("/v"), "v00000001"
        )


@pytest.mark.parametrize(("admin", "control"), [("root", "Bearer root"), ("", "Bearer user")])
async def test_control_takes_the_admin_key_and_data_the_api_key(admin: str, control: str) -> None:
    seen: dict[str, str] = {}

    def handler(request: httpx.Request) -> httpx.Response:
        seen[request.url.path] = request.headers["authorization"]
        return httpx.Response(200, json={"success": True, "ranks": [{"checksums": {"w": "0f"}}], "meta_info": {}})

    client = engine(handler, api_key="user", admin_key=admin)
    await client.pause()
    await client.load(Path("/v"), "v00000001")
    await client.flush()
    assert await client.checksums() == {"rank0/w": "0f"}
    await client.resume()
    await client.model_info()
    assert seen.pop("/model_info") == "Bearer user"
    assert set(seen.values()) == {control}
    assert len(seen) == 5


@pytest.mark.parametrize(
    "rows",
    [
        [(None, 1), (None, 2)],
        [(None, 1), (-1.0, 3)],
        [(None, 1)],
    ],
    ids=["null", "other-id", "too-few"],
)
async def test_scores_that_prove_nothing_are_refused(rows: list[tuple[float | None, int]]) -> None:
    with pytest.raises(UnusableAnswerError, match="score"):
        await engine(lambda _: scored(*rows)).score([[1, 2]])


async def test_a_token_without_cached_tokens_is_refused() -> None:
    answer = httpx.Response(200, json={"meta_info": {"output_token_logprobs": [[-1.0, 4, None]]}})
    with pytest.raises(UnusableAnswerError, match="cached_tokens"):
        await engine(lambda _: answer).generate_one([1, 2])


async def test_an_aborted_waiting_request_is_refused() -> None:
    answer = httpx.Response(200, json={"meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 0}})
    with pytest.raises(UnusableAnswerError, match="abort"):
        await engine(lambda _: answer).generate_one([1, 2])


async def test_silence_ends_at_the_deadline() -> None:
    class Silent(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

    client = SGLangEngine("engine-0", "http://engine", deadline_s=0.02, transport=Silent())
    with pytest.raises(EngineUnreachableError, match=r"0\.02 s"):
        await client.pause()


async def test_a_closed_port_is_unreachable() -> None:
    client = SGLangEngine("engine-0", "http://127.0.0.1:9", deadline_s=2.0)
    with pytest.raises(EngineUnreachableError, match="model_info"):
        await client.model_info()
    await client.close()


@pytest.mark.parametrize("content", ["not json", "[1]"])
async def test_an_answer_of_another_kind_is_refused(content: str) -> None:
    with pytest.raises(UnusableAnswerError):
        await engine(lambda _: httpx.Response(200, content=content)).model_info()


@pytest.mark.parametrize(
    "body",
    [
        [{"meta_info": None}],
        [{"meta_info": {"input_token_logprobs": [None, None, None]}}],
        [{"meta_info": {"input_token_logprobs": [[None, 1], [-1.0], [-1.0]]}}],
        ["text"],
    ],
)
async def test_an_answer_of_another_shape_is_the_engines_error(body: Any) -> None:
    with pytest.raises(UnusableAnswerError):
        await engine(lambda _: httpx.Response(200, json=body)).score([[1, 2, 3]])


@pytest.mark.parametrize(
    "body", [{"meta_info": None}, {"meta_info": {"output_token_logprobs": [3], "cached_tokens": 0}}]
)
async def test_a_generated_token_of_another_shape_is_the_engines_error(body: Any) -> None:
    with pytest.raises(UnusableAnswerError):
        await engine(lambda _: httpx.Response(200, json=body)).generate_one([1, 2])


async def test_checksums_of_another_shape_are_the_engines_error() -> None:
    with pytest.raises(UnusableAnswerError):
        await engine(lambda _: httpx.Response(200, json={"ranks": ["abc"]})).checksums()


async def test_a_body_that_cannot_be_decoded_means_unreachable() -> None:
    broken = httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip"))
    with pytest.raises(EngineUnreachableError, match="DecodingError"):
        await engine(lambda _: broken).model_info()


async def test_a_token_that_is_no_number_proves_no_freshness() -> None:
    """NaN is within every bound: no comparison with it is true."""
    body = '{"meta_info": {"output_token_logprobs": [[NaN, 3, null]], "cached_tokens": 0, "weight_version": "v"}}'
    with pytest.raises(UnusableAnswerError, match="finite"):
        await engine(lambda _: httpx.Response(200, content=body)).generate_one([1, 2])


@pytest.mark.parametrize(
    ("answer", "release"),
    [
        (httpx.Response(200, json={"version": "0.5.23", "internal_states": []}), "0.5.23"),
        (httpx.Response(200, json={"version": 5}), ""),
        (httpx.Response(200, json={}), ""),
        (httpx.Response(404, json={"detail": "Not Found"}), ""),
    ],
)
async def test_the_release_is_read_or_empty(answer: httpx.Response, release: str) -> None:
    assert await engine(lambda _: answer).server_release() == release


async def test_a_key_that_is_refused_is_no_release() -> None:
    with pytest.raises(EngineRefusedError, match="Unauthorized"):
        await engine(lambda _: httpx.Response(401, json={"error": "Unauthorized"})).server_release()


@pytest.mark.parametrize(
    ("mode", "flush", "salt"),
    [(PauseMode.RETRACT, True, ""), (PauseMode.ABORT, True, ""), (PauseMode.IN_PLACE, False, "v1")],
)
async def test_pause_load_and_probe_say_the_mode(mode: PauseMode, flush: bool, salt: str) -> None:
    sent: dict[str, Any] = {}

    def handler(request: httpx.Request) -> httpx.Response:
        sent[request.url.path] = json.loads(request.content)
        rows = {"output_token_logprobs": [[-1.0, 4, None]], "cached_tokens": 0}
        return httpx.Response(200, json={"success": True, "meta_info": rows})

    client = engine(handler)
    await client.pause(mode)
    await client.load(Path("/v"), "v00000001", flush=flush)
    await client.generate_one([1, 2], salt=salt)
    assert sent["/pause_generation"] == {"mode": mode.value}
    assert sent["/update_weights_from_disk"]["flush_cache"] is flush
    assert sent["/generate"]["extra_key"].removeprefix("sao-canary-probe") == ("-v1" if salt else "")
