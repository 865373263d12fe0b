"""The routes that a real SGLang returns are those by which transformers, with the same weights, computes the same."""

from __future__ import annotations

import base64
import random
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
import torch

from sao.routing import RoutingShape
from services.rollout.engines.sglang import SGLangEngine
from services.rollout.routing import completed, extended
from services.trainer.models import PolicyModule
from tests.support.engine import EngineServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

ROUTING = RoutingShape(layers=2, experts=4, per_token=2)
VOCABULARY = 32
ALMOST_NONE = 2e-3
"""Share of decisions in which two float32 kernels may break a near tie differently."""


@pytest.fixture
async def engine(sglang_engine: EngineServer) -> AsyncIterator[SGLangEngine]:
    made = SGLangEngine("engine-0", sglang_engine.url, VOCABULARY, routing=ROUTING)
    yield made
    await made.close()


async def episode(engine: SGLangEngine, rng: random.Random) -> tuple[list[int], dict[int, float], bytes]:
    """Token ids, log-probs of the action tokens by their place, and the record, of three turns and observations."""
    ids = [1, *(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(3, 12)))]
    logprobs: dict[int, float] = {}
    known = b""
    for _ in range(3):
        turn = await engine.generate(
            ids,
            max_new_tokens=rng.randint(4, 16),
            stop_token_ids=[],
            rid=uuid4().hex,
            timeout_s=60.0,
            routes_from=len(known) // ROUTING.row_bytes,
        )
        known = extended(known, turn.routed_experts, len(ids), turn.spans, ROUTING.row_bytes)
        logprobs |= dict(enumerate(turn.logprobs, start=len(ids)))
        ids += [*turn.token_ids, *(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 6)))]
    return ids, logprobs, completed(known, len(ids), ROUTING.row_bytes)


async def test_over_turns_and_cached_prefixes_the_routes_are_the_own_ones(
    engine: SGLangEngine, sglang_engine: EngineServer, tiny_checkpoints: tuple[Path, Path]
) -> None:
    policy = PolicyModule.load(tiny_checkpoints[0], torch.float32, 64, replay=True)
    rng = random.Random(5)
    disagreements, errors, cached = [], [], 0
    async with httpx.AsyncClient(base_url=sglang_engine.url, timeout=60.0) as http:
        for _ in range(16):
            ids, logprobs, record = await episode(engine, rng)
            routes_TLK = torch.frombuffer(bytearray(record), dtype=torch.uint8).reshape(-1, 2, 2)
            with torch.no_grad():
                logp_T, _, disagreement_T = policy(torch.tensor(ids), routes_TLK)
            assert disagreement_T is not None
            disagreements += disagreement_T[list(logprobs)].tolist()
            errors += [abs(float(logp_T[place]) - logprob) for place, logprob in logprobs.items()]

            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, "return_routed_experts": True}
            answer = (await http.post("/generate", json=body)).json()["meta_info"]
            whole = base64.b64decode(answer["routed_experts"])
            again = bytes(struct.unpack(f"<{len(whole) // 4}i", whole))
            on_record = max(logprobs) * ROUTING.row_bytes
            assert again[:on_record] == record[:on_record], "a cached prefix keeps its routes"
            cached += answer["cached_tokens"]
    disagreement = sum(disagreements) / len(disagreements)
    print(f"disagreement {disagreement:.6f} over {len(disagreements)} action tokens, {cached} tokens cached")  # noqa: T201
    print(f"largest log-prob difference under replay {max(errors):.2e}")  # noqa: T201
    assert cached > 0
    assert disagreement <= ALMOST_NONE
    assert max(errors) < 1e-4
