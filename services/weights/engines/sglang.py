"""SGLang 0.5.23 over HTTP (docs: the engine contract of that release; three error shapes, two kinds of key)."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from services.weights.engines.base import (
    EngineRefusedError,
    EngineUnreachableError,
    GeneratedToken,
    ModelInfo,
    PauseMode,
    UnusableAnswerError,
    UpdatedButNotFlushedError,
)

_KEEPALIVE_S = 4.0
"""Below uvicorn's 5 s, so that a kept connection is not one that the server is closing."""
_UPDATED_NOT_FLUSHED = "Weights were updated"
_SCORE_NAMESPACE = "sao-canary-score"
_PROBE_NAMESPACE = "sao-canary-probe"
"""Prefix-cache namespaces of our own: a rollout's prompt, resumed a moment earlier, must not look like a stale hit."""


def error_text(response: httpx.Response) -> str:
    """What the server complains about, from {"error": {"message"}}, {"error": text}, {"message"} or plain text."""
    try:
        body = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return response.text.strip()[:500]
    if isinstance(body, dict):
        error = body.get("error", body.get("message"))
        if isinstance(error, dict):
            error = error.get("message", error)
        if error is not None:
            return str(error)[:500]
    return response.text.strip()[:500]


class SGLangEngine:
    """One server; `deadline_s` bounds each call, connecting included."""

    def __init__(
        self,
        engine_id: str,
        url: str,
        *,
        deadline_s: float,
        api_key: str | None = None,
        admin_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.url = url.rstrip("/")
        self._deadline_s = deadline_s
        # With an admin key set the server takes only that on control routes, and only the api key on data routes.
        self._control = _bearer(admin_key or api_key)
        self._data = _bearer(api_key)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=None,  # noqa: S113 - _send has the deadline, for the call as a whole
            limits=httpx.Limits(max_connections=32, max_keepalive_connections=32, keepalive_expiry=_KEEPALIVE_S),
            transport=transport,
            trust_env=False,
        )

    async def model_info(self) -> ModelInfo:
        body = await self._object("model_info", "GET", "/model_info", headers=self._data)
        return ModelInfo(str(body.get("weight_version", "")), str(body.get("model_path", "")))

    async def server_release(self) -> str:
        try:
            body = await self._object("release", "GET", "/server_info", headers=self._data)
        except EngineRefusedError as error:
            if error.status == httpx.codes.NOT_FOUND:  # old releases know it by another name
                return ""
            raise
        found = body.get("version")
        return found if isinstance(found, str) else ""

    async def pause(self, mode: PauseMode = PauseMode.RETRACT) -> None:
        await self._send("pause", "POST", "/pause_generation", json={"mode": mode.value}, headers=self._control)

    async def load(self, path: Path, version: str, *, flush: bool = True) -> None:
        request = {
            "model_path": str(path),
            "weight_version": version,
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        try:
            body = await self._object("load", "POST", "/update_weights_from_disk", json=request, headers=self._control)
        except EngineRefusedError as error:
            if _UPDATED_NOT_FLUSHED in error.text:
                raise UpdatedButNotFlushedError(self.engine_id, "load", error.status, error.text) from error
            raise
        if body.get("success") is not True:
            raise EngineRefusedError(self.engine_id, "load", httpx.codes.OK, str(body.get("message", body)))

    async def flush(self) -> None:
        await self._send("flush", "POST", "/flush_cache", headers=self._control)

    async def checksums(self) -> Mapping[str, str]:
        body = await self._object(
            "checksums", "POST", "/weights_checker", json={"action": "checksum"}, headers=self._control
        )
        with self._readable("checksums", body):
            found = {
                f"rank{number}/{name}": str(value)
                for number, rank in enumerate(body.get("ranks") or [])
                for name, value in (rank.get("checksums") or {}).items()
            }
        if not found:
            raise UnusableAnswerError(self.engine_id, "checksums", f"no parameter in {str(body)[:300]}")
        return found

    async def resume(self) -> None:
        await self._send("resume", "POST", "/continue_generation", json={}, headers=self._control)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        request = {
            "input_ids": [list(sequence) for sequence in sequences],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": [_SCORE_NAMESPACE] * len(sequences),
        }
        answers = await self._json("score", "POST", "/generate", json=request, headers=self._data)
        if not isinstance(answers, list) or len(answers) != len(sequences):
            detail = f"expected {len(sequences)} answers, found {str(answers)[:300]}"
            raise UnusableAnswerError(self.engine_id, "score", detail)
        with self._readable("score", answers):
            return [self._prompt_logprobs(ids, answer) for ids, answer in zip(sequences, answers, strict=True)]

    def _prompt_logprobs(self, token_ids: Sequence[int], answer: Mapping[str, Any]) -> list[float]:
        rows = (answer.get("meta_info", {}).get("input_token_logprobs") or [])[1:]
        # SGLang 0.5.23 reports the last id of the vocabulary as 0 here; its log-prob is that of the real id.
        same = len(rows) == len(token_ids) - 1 and all(
            row[1] in {t, 0} for row, t in zip(rows, token_ids[1:], strict=True)
        )
        if not same:
            detail = f"log-probs of ids {[row[1] for row in rows]}, expected those of {list(token_ids[1:])}"
            raise UnusableAnswerError(self.engine_id, "score", detail)
        return [self._number("score", row[0]) for row in rows]

    async def generate_one(self, token_ids: Sequence[int], *, salt: str = "") -> GeneratedToken:
        request = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "extra_key": f"{_PROBE_NAMESPACE}-{salt}" if salt else _PROBE_NAMESPACE,
        }
        body = await self._object("generate", "POST", "/generate", json=request, headers=self._data)
        with self._readable("generate", body):
            meta = body.get("meta_info", {})
            rows, cached = meta.get("output_token_logprobs") or [], meta.get("cached_tokens")
            if len(rows) != 1 or not isinstance(cached, int):
                finish = meta.get("finish_reason")
                detail = f"{len(rows)} tokens, cached_tokens {cached!r}, finish {finish}; expected 1 token"
                raise UnusableAnswerError(self.engine_id, "generate", detail)
            return GeneratedToken(
                token_id=int(rows[0][1]),
                logprob=self._number("generate", rows[0][0]),
                cached_tokens=cached,
                version=str(meta.get("weight_version", "")),
            )

    async def close(self) -> None:
        await self._http.aclose()

    @contextmanager
    def _readable(self, step: str, body: object) -> Iterator[None]:
        """An answer of another shape is this engine's fault: it must not end the service that keeps the others."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            detail = f"not the shape that SGLang answers in ({type(error).__name__}: {error}): {str(body)[:300]}"
            raise UnusableAnswerError(self.engine_id, step, detail) from error

    def _number(self, step: str, value: object) -> float:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UnusableAnswerError(
                self.engine_id, step, f"log-prob {value!r}, expected a finite number (NaN weights?)"
            )
        return float(value)

    async def _object(
        self, step: str, method: str, path: str, *, headers: Mapping[str, str], json: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        body = await self._json(step, method, path, headers=headers, json=json)
        if not isinstance(body, dict):
            raise UnusableAnswerError(self.engine_id, step, f"expected an object, found {str(body)[:300]}")
        return body

    async def _json(
        self, step: str, method: str, path: str, *, headers: Mapping[str, str], json: Mapping[str, object] | None = None
    ) -> object:
        response = await self._send(step, method, path, headers=headers, json=json)
        try:
            body: object = response.json()
        except ValueError as error:
            detail = f"expected JSON, found {response.text[:300]!r}"
            raise UnusableAnswerError(self.engine_id, step, detail) from error
        return body

    async def _send(
        self, step: str, method: str, path: str, *, headers: Mapping[str, str], json: Mapping[str, object] | None = None
    ) -> httpx.Response:
        try:
            async with asyncio.timeout(self._deadline_s):
                response = await self._http.request(method, path, json=json, headers=headers)
        except TimeoutError as error:
            detail = f"no answer from {self.url}{path} within {self._deadline_s} s"
            raise EngineUnreachableError(self.engine_id, step, detail) from error
        except httpx.RequestError as error:
            detail = f"{self.url}{path}: {type(error).__name__}: {error}"
            raise EngineUnreachableError(self.engine_id, step, detail) from error
        if response.status_code != httpx.codes.OK:
            raise EngineRefusedError(self.engine_id, step, response.status_code, error_text(response))
        return response


def _bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
