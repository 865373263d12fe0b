"""SGLang over its native `/generate` (0.5.23; docs/engine.md has what it really does).

Three error shapes are read, abortion arrives as 200, null log-probs mean NaN weights, and a request that the
client has given up still runs until it is aborted by its rid. `ignore_eos` stays off because it switches
`stop_token_ids` off too (schedule_batch.py); so the checkpoint's own end-of-sequence id ends a turn as well.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Mapping, Sequence

import httpx
from pydantic import BaseModel, ValidationError

from sao.routing import RoutingShape
from services.rollout.engines.base import (
    SAMPLING,
    EngineAbortedError,
    EngineOutputError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnavailableError,
    Finish,
    Span,
    Turn,
    check_prompt,
    check_routes,
    check_salt,
    check_turn,
)

_ABORT_TIMEOUT_S = 2.0
_KEEPALIVE_S = 2.0


class _FinishReason(BaseModel):
    type: str
    message: str = ""


class _Span(BaseModel):
    version: str
    start: int
    end: int


class _Meta(BaseModel):
    """Every key has a default: a request aborted while it waited carries few of them."""

    finish_reason: _FinishReason | None = None
    weight_versions: list[_Span] = []
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    routed_experts: str | None = None
    cached_tokens: int | None = None


class _Answer(BaseModel):
    output_ids: list[int] = []
    meta_info: _Meta


class SGLangEngine:
    """One SGLang server; `vocab_size` is the row count of the model's embedding, not the tokenizer's."""

    def __init__(
        self,
        engine_id: str,
        url: str,
        vocab_size: int,
        *,
        routing: RoutingShape | None = None,
        api_key: str | None = None,
        connections: int = 256,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.engine_id = engine_id
        self._vocab_size = vocab_size
        self._routing = routing
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            # uvicorn closes idle connections after 5 s; expiring them first avoids writing into one it has just closed.
            limits=httpx.Limits(
                max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=_KEEPALIVE_S
            ),
            transport=transport,
            trust_env=False,
        )

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        rid: str,
        timeout_s: float,
        routes_from: int = 0,
        cache_salt: str = "",
    ) -> Turn:
        check_prompt(self.engine_id, input_ids, self._vocab_size)
        body = {
            "rid": rid,
            "input_ids": list(input_ids),
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "stop_token_ids": list(stop_token_ids),
                "temperature": SAMPLING.temperature,
                "top_p": SAMPLING.top_p,
                "top_k": SAMPLING.top_k,
                "min_p": SAMPLING.min_p,
                "repetition_penalty": SAMPLING.repetition_penalty,
                "frequency_penalty": SAMPLING.frequency_penalty,
                "presence_penalty": SAMPLING.presence_penalty,
            },
        }
        if self._routing is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routes_from}
        if cache_salt:
            body["extra_key"] = cache_salt
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.post("/generate", json=body, timeout=None)
        except TimeoutError:
            await self._abort(rid)
            raise EngineTimeoutError(self.engine_id, f"turn {rid}: no answer within {timeout_s:g} s") from None
        except httpx.RequestError as error:
            text = f"turn {rid}: {type(error).__name__} {error}"
            raise EngineUnavailableError(self.engine_id, text) from error
        if response.status_code != httpx.codes.OK:
            raise self._refusal(rid, response)
        turn, cached_tokens = self._turn(rid, response, time.monotonic() - started)
        check_turn(self.engine_id, turn, max_new_tokens=max_new_tokens, vocab_size=self._vocab_size)
        check_salt(self.engine_id, turn, cache_salt, read_cache=cached_tokens != 0)
        if self._routing is None:
            return turn
        return check_routes(self.engine_id, turn, routes_from, len(input_ids), self._routing)

    async def close(self) -> None:
        await self._client.aclose()

    def _turn(self, rid: str, response: httpx.Response, engine_s: float) -> tuple[Turn, int | None]:
        """And how many tokens of the prompt were cached; None: it does not say."""
        try:
            answer = _Answer.model_validate_json(response.content)
        except ValidationError as error:
            text = f"turn {rid}: answer is not what /generate gives: {error.errors(include_url=False)[:2]}"
            raise EngineOutputError(self.engine_id, text) from error
        meta = answer.meta_info
        reason = meta.finish_reason
        if reason is not None and reason.type == "abort":
            text = f"turn {rid}: {reason.message or 'aborted'} after {len(answer.output_ids)} tokens"
            raise EngineAbortedError(self.engine_id, text)
        if reason is None or reason.type not in {"stop", "length"}:
            raise EngineOutputError(
                self.engine_id, f"turn {rid}: finish_reason {reason}, expected stop, length or abort"
            )
        logprobs = [logprob for logprob, _, _ in meta.output_token_logprobs if logprob is not None]
        if len(logprobs) != len(meta.output_token_logprobs):
            raise EngineOutputError(self.engine_id, f"turn {rid}: log-probs are null: the engine's weights hold NaN")
        if [token for _, token, _ in meta.output_token_logprobs] != answer.output_ids:
            raise EngineOutputError(self.engine_id, f"turn {rid}: log-probs belong to other ids than output_ids")
        spans = [Span(span.version, span.start, span.end) for span in meta.weight_versions]
        routes = b"" if self._routing is None else self._routes(rid, meta.routed_experts)
        return Turn(answer.output_ids, logprobs, spans, Finish(reason.type), engine_s, routes), meta.cached_tokens

    def _routes(self, rid: str, encoded: str | None) -> bytes:
        """One byte for each of the int32 ids."""
        if encoded is None:
            text = f"turn {rid}: no routed experts: start the server with --enable-return-routed-experts"
            raise EngineOutputError(self.engine_id, text)
        try:
            raw = base64.b64decode(encoded, validate=True)
        except ValueError as error:
            raise EngineOutputError(self.engine_id, f"turn {rid}: routed experts are no base64: {error}") from error
        if any(raw[byte::4].strip(b"\0") for byte in (1, 2, 3)):
            raise EngineOutputError(self.engine_id, f"turn {rid}: routed experts hold ids outside 0..255")
        return raw[::4]

    def _refusal(self, rid: str, response: httpx.Response) -> EngineUnavailableError | EngineRefusedError:
        text = f"turn {rid}: HTTP {response.status_code}: {error_text(response)}"
        if response.is_server_error or response.status_code == httpx.codes.TOO_MANY_REQUESTS:
            return EngineUnavailableError(self.engine_id, text)
        return EngineRefusedError(self.engine_id, text)

    async def _abort(self, rid: str) -> None:
        """Free the slot; a request held by a pause ignores this and runs to its own end."""
        try:
            await self._client.post("/abort_request", json={"rid": rid}, timeout=_ABORT_TIMEOUT_S)
        except httpx.RequestError:
            return


def error_text(response: httpx.Response) -> str:
    """What went wrong, from any of `{"error": {"message"}}`, `{"error": text}`, `{"message": text}`, or plain text."""
    try:
        body = response.json()
    except ValueError:
        return response.text[:500]
    if isinstance(body, Mapping):
        error = body.get("error", body)
        if isinstance(error, Mapping):
            error = error.get("message", error)
        return str(error)[:500]
    return str(body)[:500]
