"""The proxy's faults on real sockets, and the ledger of acknowledgements behind a real gRPC ingest."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from sao.v1 import ingest_pb2 as pb
from services.rollout.ingest_client import make_stub, open_channel
from tests.chaos.acknowledgements import Answer, AnswerReader
from tests.chaos.proxy import LATENCY_S, Link, Mode, Proxies, Watcher
from tests.support.ingest import memory_ingest
from tests.support.trajectories import good
from tests.support.waiting import eventually


@pytest.fixture
def proxies() -> Iterator[Proxies]:
    made = Proxies()
    yield made
    made.close()
    assert made.errors == []


@pytest.fixture
async def echo_port() -> AsyncIterator[int]:
    """A server that says everything back."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1024):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def dial(link: Link) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", link.port)


async def read_one(link: Link) -> bytes:
    reader, _ = await dial(link)
    return await reader.readexactly(1)


async def test_a_link_passes_everything_on_and_the_end_too(proxies: Proxies, echo_port: int) -> None:
    reader, writer = await dial(proxies.link(echo_port))
    text = bytes(range(256)) * 1000
    writer.write(text)
    writer.write_eof()

    assert await reader.read(-1) == text


async def test_latency_delays_both_directions(proxies: Proxies, echo_port: int) -> None:
    link = proxies.link(echo_port)
    proxies.switch(link, Mode.LATENCY)
    reader, writer = await dial(link)
    started = time.monotonic()
    writer.write(b"ping")

    assert await reader.readexactly(4) == b"ping"
    assert time.monotonic() - started >= 2 * LATENCY_S


async def test_reset_ends_old_connections_and_new_ones(proxies: Proxies, echo_port: int) -> None:
    link = proxies.link(echo_port)
    old, old_writer = await dial(link)
    old_writer.write(b"x")
    await old.readexactly(1)
    await asyncio.to_thread(proxies.switch, link, Mode.RESET)

    with pytest.raises(ConnectionResetError):
        await old.readexactly(1)
    with pytest.raises(ConnectionResetError):
        await read_one(link)


async def test_a_black_hole_holds_back_and_what_was_sent_arrives_afterwards(proxies: Proxies, echo_port: int) -> None:
    link = proxies.link(echo_port)
    reader, writer = await dial(link)
    proxies.switch(link, Mode.BLACK_HOLE)
    writer.write(b"late")

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readexactly(4), timeout=0.2)
    proxies.switch(link, Mode.PASS)
    assert await reader.readexactly(4) == b"late"


async def test_a_server_that_is_away_is_a_connection_that_ends(proxies: Proxies) -> None:
    with pytest.raises(ConnectionResetError):
        await read_one(proxies.link(1))


async def test_the_ledger_reads_what_ingest_told_the_worker(proxies: Proxies) -> None:
    seen: list[Answer] = []

    def watch() -> Watcher:
        reader = AnswerReader()
        return lambda data: seen.extend(reader.feed(data))

    async with memory_ingest() as ingest:
        port = int(ingest.config.ingest.target.rpartition(":")[2])
        link = proxies.link(port, watch)
        target = ingest.config.ingest.model_copy(update={"target": f"127.0.0.1:{link.port}"})
        async with open_channel(ingest.config.model_copy(update={"ingest": target})) as channel:
            stub = make_stub(channel)
            rng = random.Random(0)
            first, second = (good(rng, ingest.limits, ordinal=0) for _ in range(2))
            leases = await stub.LeasePrompts(pb.LeasePromptsRequest(worker_id="w", max_leases=4))
            assert leases.leases
            for trajectory in (first, first, second):
                await stub.Publish(pb.PublishRequest(trajectory=trajectory))

    await eventually(lambda: len(seen) == 3, what="three answers in the ledger")
    assert seen == [
        Answer(first.id, "accepted"),
        Answer(first.id, "duplicate"),
        Answer(second.id, "superseded"),
    ]


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body


def grpc_message(message: bytes, *, compressed: bool = False) -> bytes:
    return bytes([compressed]) + len(message).to_bytes(4) + message


def test_an_answer_is_found_however_the_bytes_are_cut() -> None:
    trajectory_id = "0196f0a0-0000-7000-8000-000000000001"
    response = pb.PublishResponse(id=trajectory_id, status=pb.PUBLISH_STATUS_ACCEPTED)
    message = grpc_message(response.SerializeToString())
    padded = bytes([3]) + message[7:] + b"\0\0\0"
    stream = frame(4, 0, 0, b"") + frame(0, 0, 5, message[:7]) + frame(0, 0x8, 5, padded) + frame(1, 1, 5, b"trailer")
    for size in (1, 7, len(stream)):
        reader = AnswerReader()
        found = [answer for i in range(0, len(stream), size) for answer in reader.feed(stream[i : i + size])]
        assert found == [Answer(trajectory_id, "accepted")]


def test_a_compressed_message_is_no_hole_in_the_ledger() -> None:
    with pytest.raises(ValueError, match="compressed"):
        AnswerReader().feed(frame(0, 0, 1, grpc_message(b"x", compressed=True)))
