"""The ingest over real gRPC: idempotency, back-pressure, a silent store, old ids, tokens, leases."""

from __future__ import annotations

import random
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import REGISTRY

from sao.board.base import TrainerFacts, TrainerState
from sao.board.memory import MemoryBoard
from sao.ids import uuid7
from sao.streams.base import StreamName, StreamUnavailableError
from sao.streams.memory import MemoryStreams
from sao.trajectory import Trajectory
from sao.v1 import ingest_pb2 as pb
from sao.v1 import trajectory_pb2
from services.rollout.ingest_client import open_channel, retry_after_s
from tests.support.ingest import Ingest, announce, memory_ingest
from tests.support.trajectories import ROUTING, bad, good, routed_experts
from tests.support.waiting import eventually

SERVICE = "/sao.v1.TrajectoryIngestService"


class SilentStreams(MemoryStreams):
    """A store that stops answering when told to."""

    silent = False

    async def memory_fraction(self) -> float:
        if self.silent:
            msg = "memory_fraction: no answer within 5 s"
            raise StreamUnavailableError(msg)
        return await super().memory_fraction()


@pytest.fixture
async def ingest() -> AsyncIterator[Ingest]:
    async with memory_ingest() as opened:
        yield opened


def shown(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


async def publish(ingest: Ingest, message: trajectory_pb2.Trajectory) -> pb.PublishStatus.ValueType:
    request = pb.PublishRequest(trajectory=message)
    response = await ingest.stub.Publish(request, timeout=10, metadata=ingest.metadata)
    assert response.id == message.id
    return response.status


async def refusal(ingest: Ingest, message: trajectory_pb2.Trajectory) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await publish(ingest, message)
    return refused.value


async def lease(ingest: Ingest, count: int) -> pb.LeasePromptsResponse:
    return await ingest.stub.LeasePrompts(pb.LeasePromptsRequest(worker_id="w", max_leases=count), timeout=10)


async def test_an_accepted_trajectory_is_durable_byte_for_byte(ingest: Ingest) -> None:
    message = good(random.Random(0), ingest.limits)
    assert await publish(ingest, message) == pb.PUBLISH_STATUS_ACCEPTED
    (delivery,) = await ingest.streams.read(StreamName.TRAJECTORIES, "c", count=9, block_ms=0)
    assert delivery.fields == {"task": "count", "ordinal": str(message.ordinal)}
    payload = await ingest.streams.payload(message.id)
    assert payload is not None
    assert Trajectory.from_bytes(payload).message == message


async def test_alerts_are_told_the_limits_and_when_the_last_trajectory_was_accepted(ingest: Ingest) -> None:
    config = ingest.config
    assert shown("sao_ingest_admission_limit_trajectories") == config.admission_limit
    assert shown("sao_ingest_back_pressure_ratio") == config.redis.back_pressure_at
    assert shown("sao_ingest_episode_deadline_seconds") == config.ingest.episode_deadline_s
    assert shown("sao_ingest_store_errors_total", kind="unavailable") is not None
    before = time.time()
    assert (shown("sao_ingest_last_accepted_seconds") or 0) <= before
    message = good(random.Random(0), ingest.limits)
    await publish(ingest, message)
    accepted = shown("sao_ingest_last_accepted_seconds")
    assert accepted is not None
    assert accepted >= before
    await publish(ingest, message)
    assert shown("sao_ingest_last_accepted_seconds") == accepted, "a duplicate is no news"


async def test_routed_experts_are_stored_beside_the_trajectory_that_names_them() -> None:
    rng = random.Random(0)
    async with memory_ingest("trainer.routing_replay=true") as ingest:
        first, repeated, superseded = (good(rng, ingest.limits, ordinal=7) for _ in range(3))
        repeated.id = first.id
        requests = [
            pb.PublishStreamRequest(trajectory=message, routed_experts=routed_experts(rng, message, ROUTING))
            for message in (first, repeated, superseded)
        ]
        responses = [response async for response in ingest.stub.PublishStream(iter(requests), timeout=10)]
        payload = await ingest.streams.payload(first.id)
        record = await ingest.streams.routed_experts(first.id)
        left_behind = await ingest.streams.routed_experts(superseded.id)
    assert [response.status for response in responses] == [
        pb.PUBLISH_STATUS_ACCEPTED,
        pb.PUBLISH_STATUS_DUPLICATE,
        pb.PUBLISH_STATUS_SUPERSEDED,
    ]
    assert payload is not None
    assert Trajectory.from_bytes(payload).message.routed_experts_key == f"routed-experts:{first.id}"
    assert (record, left_behind) == (requests[0].routed_experts, None)


async def test_a_key_of_routed_experts_that_did_not_come_is_not_believed(ingest: Ingest) -> None:
    message = good(random.Random(0), ingest.limits)
    message.routed_experts_key = "routed-experts:elsewhere"
    await publish(ingest, message)
    payload = await ingest.streams.payload(message.id)
    assert payload is not None
    assert not Trajectory.from_bytes(payload).message.routed_experts_key


@pytest.mark.parametrize(
    ("replay", "damage", "text"),
    [
        ("true", lambda record: record[:-1], "routed_experts: .* bytes, expected"),
        ("true", lambda record: record + record[:4], "routed_experts: .* bytes, expected"),
        ("true", lambda _: b"", "routed_experts: 0 bytes, expected"),
        ("true", lambda record: b"\x04" + record[1:], "routed_experts: holds expert 4, expected ids below 4, or 255"),
        ("false", lambda record: record, "routed_experts: .* expected none: trainer.routing_replay is off"),
    ],
)
async def test_a_record_of_routed_experts_that_does_not_fit_is_refused_by_name(
    replay: str, damage: Callable[[bytes], bytes], text: str
) -> None:
    rng = random.Random(0)
    async with memory_ingest(f"trainer.routing_replay={replay}") as ingest:
        message = good(rng, ingest.limits)
        request = pb.PublishRequest(trajectory=message, routed_experts=damage(routed_experts(rng, message, ROUTING)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ingest.stub.Publish(request, timeout=10)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert re.search(text, refused.value.details() or "")
        assert await ingest.streams.routed_experts(message.id) is None
        assert (await ingest.streams.depth(StreamName.TRAJECTORIES)).length == 0


async def test_trajectory_and_routed_experts_together_have_one_limit_of_size() -> None:
    rng = random.Random(0)
    async with memory_ingest("trainer.routing_replay=true") as ingest:
        message = good(rng, ingest.limits)
        record = routed_experts(rng, message, ROUTING)
        message.task_payload_json = '{"x": "' + "x" * (2**20 - message.ByteSize() - 20) + '"}'
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ingest.stub.Publish(pb.PublishRequest(trajectory=message, routed_experts=record), timeout=10)
    assert message.ByteSize() <= 2**20 < message.ByteSize() + len(record)
    assert "too_large: " in (refused.value.details() or "")
    assert "with its routed experts" in (refused.value.details() or "")


async def test_a_repeated_id_answers_duplicate_and_changes_nothing(ingest: Ingest) -> None:
    message = good(random.Random(0), ingest.limits)
    await publish(ingest, message)
    assert await publish(ingest, message) == pb.PUBLISH_STATUS_DUPLICATE
    assert (await ingest.streams.depth(StreamName.TRAJECTORIES)).length == 1


async def test_the_first_durable_trajectory_of_an_ordinal_wins(ingest: Ingest) -> None:
    rng = random.Random(0)
    await publish(ingest, good(rng, ingest.limits, ordinal=7))
    assert await publish(ingest, good(rng, ingest.limits, ordinal=7)) == pb.PUBLISH_STATUS_SUPERSEDED
    assert (await ingest.streams.depth(StreamName.TRAJECTORIES)).length == 1


async def test_a_stream_answers_every_item_in_order_and_a_bad_one_fails_alone(ingest: Ingest) -> None:
    rng = random.Random(0)
    first, last = good(rng, ingest.limits, ordinal=0), good(rng, ingest.limits, ordinal=1)
    broken, code = bad("unequal_lengths", rng, ingest.limits)
    requests = [pb.PublishStreamRequest(trajectory=message) for message in (first, broken, first, last)]
    call = ingest.stub.PublishStream(iter(requests), timeout=10)
    responses = [response async for response in call]
    assert [response.id for response in responses] == [first.id, broken.id, first.id, last.id]
    assert [response.status for response in responses] == [
        pb.PUBLISH_STATUS_ACCEPTED,
        pb.PUBLISH_STATUS_UNSPECIFIED,
        pb.PUBLISH_STATUS_DUPLICATE,
        pb.PUBLISH_STATUS_ACCEPTED,
    ]
    assert responses[1].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert code.value in responses[1].error.message


async def test_a_version_announced_after_the_last_look_is_known(ingest: Ingest) -> None:
    message = good(random.Random(0), ingest.limits)
    await publish(ingest, message)
    message.id, message.ordinal = uuid7(), message.ordinal + 1
    message.segments[0].versions[0].version = "v00000099"
    assert "v00000099" in ((await refusal(ingest, message)).details() or "")
    await announce(ingest.board, "v00000099")
    assert await publish(ingest, message) == pb.PUBLISH_STATUS_ACCEPTED


async def test_a_version_that_an_emptied_board_does_not_know_may_come_back() -> None:
    """INVALID_ARGUMENT would send the worker's trajectory to the dead folder, though the trainer announces it again."""
    board = MemoryBoard()
    async with memory_ingest(board=board) as ingest:
        message = good(random.Random(0), ingest.limits)
        message.segments[0].versions[0].version = "v00000099"
        board.newest_epoch = 0
        refused = await refusal(ingest, message)
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert retry_after_s(refused) is not None
        await announce(board, "v00000099")
        await board.new_trainer_epoch()
        assert await publish(ingest, message) == pb.PUBLISH_STATUS_ACCEPTED


async def test_an_id_older_than_the_horizon_is_a_failed_precondition(ingest: Ingest) -> None:
    message = good(random.Random(0), ingest.limits)
    message.id = uuid7(unix_ms=1_700_000_000_000)
    error = await refusal(ingest, message)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "expected at most 24 h" in (error.details() or "")


async def test_an_id_from_the_future_would_outlive_what_was_seen_and_is_a_failed_precondition(ingest: Ingest) -> None:
    now_ms = time.time_ns() // 1_000_000
    message = good(random.Random(0), ingest.limits)
    message.id = uuid7(unix_ms=now_ms + 2 * 3_600_000)
    error = await refusal(ingest, message)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "set the worker's clock" in (error.details() or "")
    message.id = uuid7(unix_ms=now_ms + 3_500_000)
    assert await publish(ingest, message) == pb.PUBLISH_STATUS_ACCEPTED


async def test_a_store_above_its_mark_is_back_pressure_with_a_hint_for_publish_and_for_leases() -> None:
    board = MemoryBoard()
    streams = MemoryStreams(board, capacity_bytes=600)
    async with memory_ingest("redis.back_pressure_at=0.25", streams=streams, board=board) as ingest:
        rng = random.Random(0)
        await publish(ingest, good(rng, ingest.limits, ordinal=0))
        assert await streams.memory_fraction() > 0.25

        async def pressed() -> bool:
            return (await lease(ingest, 1)).admission == pb.ADMISSION_STATE_BACK_PRESSURE

        await eventually(pressed, what="back-pressure")
        error = await refusal(ingest, good(rng, ingest.limits, ordinal=1))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_after_s(error) == 0.5
        assert (await streams.depth(StreamName.TRAJECTORIES)).length == 1


async def test_a_store_that_does_not_answer_is_unavailable_with_a_hint() -> None:
    board = MemoryBoard()
    streams = SilentStreams(board)
    async with memory_ingest(streams=streams, board=board) as ingest:
        streams.silent = True
        error = await refusal(ingest, good(random.Random(0), ingest.limits))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert retry_after_s(error) == 0.5
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await lease(ingest, 1)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),), (("authorization", "Basic right"),)])
async def test_without_the_token_every_call_is_unauthenticated(metadata: tuple[tuple[str, str], ...]) -> None:
    async with memory_ingest("auth.token=right") as ingest:
        request = pb.PublishRequest(trajectory=good(random.Random(0), ingest.limits))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ingest.stub.Publish(request, timeout=10, metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ingest.stub.LeasePrompts(pb.LeasePromptsRequest(worker_id="w", max_leases=1), metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await publish(ingest, request.trajectory) == pb.PUBLISH_STATUS_ACCEPTED


async def test_until_a_version_is_known_everything_is_unavailable_with_a_hint() -> None:
    async with memory_ingest(opened=False) as ingest:
        error = await refusal(ingest, good(random.Random(0), ingest.limits))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert retry_after_s(error) is not None
        with pytest.raises(grpc.aio.AioRpcError, match="no weight version yet"):
            await lease(ingest, 1)


async def test_leases_stop_at_the_admission_limit_and_go_on_when_work_is_consumed() -> None:
    async with memory_ingest("rollout.concurrency=2", "trainer.max_lag=0", "trainer.publish_every=1") as ingest:
        assert ingest.config.admission_limit == 2
        granted = await lease(ingest, 5)
        assert [item.ordinal for item in granted.leases] == [0, 1]
        assert granted.admission == pb.ADMISSION_STATE_FULL
        assert granted.retry_after_ms > 0
        message = good(random.Random(0), ingest.limits, ordinal=0)
        await publish(ingest, message)
        assert not (await lease(ingest, 1)).leases, "durable and not consumed still counts"
        await ingest.streams.mark_consumed([message.id])
        assert [item.ordinal for item in (await lease(ingest, 5)).leases] == [2]


async def test_renewing_answers_the_leases_that_are_still_held(ingest: Ingest) -> None:
    first, second = (await lease(ingest, 2)).leases
    await publish(ingest, good(random.Random(0), ingest.limits, ordinal=first.ordinal))
    request = pb.RenewLeasesRequest(worker_id="w", lease_ids=[first.lease_id, second.lease_id, "nonsense"])
    renewed = (await ingest.stub.RenewLeases(request, timeout=10)).renewed
    assert [item.lease_id for item in renewed] == [second.lease_id]
    assert renewed[0].expires_ms >= second.expires_ms


async def test_a_finished_run_gives_no_leases(ingest: Ingest) -> None:
    facts = TrainerFacts(epoch=1, update=9, version="v00000003", consumed=9, state=TrainerState.FINISHED)
    await ingest.board.write_trainer(facts)
    response = await lease(ingest, 3)
    assert (list(response.leases), response.admission) == ([], pb.ADMISSION_STATE_FINISHED)


@pytest.mark.parametrize(
    "request_",
    [
        pb.LeasePromptsRequest(max_leases=1),
        pb.LeasePromptsRequest(worker_id="w"),
        pb.LeasePromptsRequest(worker_id="w", max_leases=1025),
        pb.LeasePromptsRequest(worker_id="w" * 257, max_leases=1),
        pb.RenewLeasesRequest(lease_ids=["0-1"]),
        pb.RenewLeasesRequest(worker_id="w" * 257, lease_ids=["0-1"]),
        pb.RenewLeasesRequest(worker_id="w", lease_ids=["0-1"] * 65_537),
    ],
    ids=lambda request: f"{type(request).__name__}-{request.ByteSize()}",
)
async def test_a_request_about_leases_without_a_proper_name_or_number_is_invalid(
    ingest: Ingest, request_: pb.LeasePromptsRequest | pb.RenewLeasesRequest
) -> None:
    about: Any = ingest.stub.LeasePrompts if isinstance(request_, pb.LeasePromptsRequest) else ingest.stub.RenewLeases
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await about(request_, timeout=10)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


UNDECODABLE = {
    "corrupt": b"\xff\xff\xff",
    "cut": b"\x0a\xff\x01\x00",
    "not UTF-8": pb.PublishRequest(trajectory=trajectory_pb2.Trajectory(id="x")).SerializeToString()[:-1] + b"\xff",
}


@pytest.mark.parametrize("method", ["Publish", "LeasePrompts", "RenewLeases"])
@pytest.mark.parametrize("data", UNDECODABLE.values(), ids=UNDECODABLE)
async def test_bytes_that_are_no_request_are_an_invalid_argument(ingest: Ingest, method: str, data: bytes) -> None:
    async with open_channel(ingest.config) as channel:
        call = channel.unary_unary(f"{SERVICE}/{method}", lambda data: data, lambda data: data)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(data, timeout=10)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{len(data)} bytes are no request of this method" in (refused.value.details() or "")


@pytest.mark.parametrize("data", UNDECODABLE.values(), ids=UNDECODABLE)
async def test_an_item_that_is_no_request_fails_alone_in_its_stream(ingest: Ingest, data: bytes) -> None:
    rng = random.Random(0)
    whole = [pb.PublishStreamRequest(trajectory=good(rng, ingest.limits, ordinal=n)) for n in (0, 1)]
    items = [whole[0].SerializeToString(), data, whole[1].SerializeToString()]
    async with open_channel(ingest.config) as channel:
        decode = pb.PublishStreamResponse.FromString
        call = channel.stream_stream(f"{SERVICE}/PublishStream", lambda data: data, decode)
        responses = [response async for response in call(iter(items), timeout=10)]
    assert [response.id for response in responses] == [whole[0].trajectory.id, "", whole[1].trajectory.id]
    assert [response.WhichOneof("result") for response in responses] == ["status", "error", "status"]
    assert responses[1].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def test_a_refusal_reaches_the_client_whatever_it_quotes(ingest: Ingest) -> None:
    message = good(random.Random(0), ingest.limits)
    message.id = message.run = "\U0001f4a5" * 64
    message.task_payload_json = "\U0001f4a5" * 64
    for number, segment in enumerate(message.segments):
        for span in segment.versions:
            span.version = "\U0001f4a5" * 60 + str(number)
        segment.logprobs.append(1.0)
    error = await refusal(ingest, message)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "id: id is '\\U0001f4a5" in (error.details() or "")
