"""Nothing malformed reaches the stream: 200 generated bad trajectories over real gRPC, in front of a real store."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from sao import board as boards
from sao import streams as trajectory_streams
from sao.config import RunConfig
from sao.streams.base import StreamName
from sao.v1 import ingest_pb2 as pb
from services.rollout.ingest import leases
from tests.support.ingest import Ingest, serving
from tests.support.trajectories import MUTATIONS, bad, good


@pytest.fixture
async def ingest(run_config: RunConfig) -> AsyncIterator[Ingest]:
    config = run_config.model_copy(
        update={"ingest": run_config.ingest.model_copy(update={"max_message_mb": 1, "max_tokens": 512})}
    )
    streams, board, ledger = (
        trajectory_streams.connect(config),
        boards.connect(config),
        leases.connect(config),
    )
    await board.new_trainer_epoch()
    try:
        async with serving(config, streams, board, ledger) as opened:
            yield opened
    finally:
        await ledger.close()
        await board.close()
        await streams.close()


async def test_200_malformed_trajectories_are_each_refused_by_name_and_none_reaches_the_stream(ingest: Ingest) -> None:
    names = list(MUTATIONS)
    for number in range(200):
        rng = random.Random(number)
        message, code = bad(names[number % len(names)], rng, ingest.limits)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ingest.stub.Publish(pb.PublishRequest(trajectory=message), timeout=10)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (number, refused.value.details())
        assert f"{code.value}: " in (refused.value.details() or "")
    assert (await ingest.streams.depth(StreamName.TRAJECTORIES)).length == 0
    assert await ingest.streams.unconsumed() == 0
    await ingest.stub.Publish(pb.PublishRequest(trajectory=good(random.Random(0), ingest.limits)), timeout=10)
    assert (await ingest.streams.depth(StreamName.TRAJECTORIES)).length == 1


async def test_two_broken_invariants_are_both_named(ingest: Ingest) -> None:
    rng = random.Random(1)
    message, first = bad("another_distribution", rng, ingest.limits)
    second, mutate = MUTATIONS["id_outside_vocabulary"]
    mutate(message, rng, ingest.limits)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ingest.stub.Publish(pb.PublishRequest(trajectory=message), timeout=10)
    details = refused.value.details() or ""
    assert f"{first.value}: " in details
    assert f"{second.value}: " in details
