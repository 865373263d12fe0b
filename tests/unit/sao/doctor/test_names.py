"""A name server is asked over both ways, and what it says is told from its silence."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest

from sao.doctor.names import Resolver, answers, ask, asked_of_a_server, look_up, question, resolver

Answer = Callable[[bytes], bytes | None]
"""What the server sends for a question; None: nothing."""


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if (said := self._answer(data)) is not None:
            self._transport.sendto(said, addr)


@contextlib.asynccontextmanager
async def name_server(*, udp: Answer, tcp: Answer) -> AsyncIterator[int]:
    """One that speaks both on one port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = struct.unpack("!H", await reader.readexactly(2))
        if (said := tcp(await reader.readexactly(length))) is not None:
            writer.write(struct.pack("!H", len(said)) + said)
        else:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Udp(udp), local_addr=("127.0.0.1", port)
    )
    try:
        yield port
    finally:
        transport.close()
        server.close()
        await asyncio.sleep(0)  # a transport closes its socket in the loop's next turn


def no_such_name(asked: bytes) -> bytes:
    """NXDOMAIN."""
    return asked[:2] + struct.pack("!H", 0x8183) + asked[4:]


def nothing(_: bytes) -> None:
    return None


def of_another(asked: bytes) -> bytes:
    (number,) = struct.unpack("!H", asked[:2])
    return no_such_name(struct.pack("!H", number ^ 1) + asked[2:])


async def said(protocol: str, *, udp: Answer, tcp: Answer) -> str:
    async with name_server(udp=udp, tcp=tcp) as port:
        return await ask("127.0.0.1", protocol, "valkey.sao.svc.cluster.local", timeout_s=0.3, port=port)


async def test_a_server_that_knows_no_such_name_answers() -> None:
    assert await said("UDP", udp=no_such_name, tcp=nothing) == ""
    assert await said("TCP", udp=nothing, tcp=no_such_name) == ""


async def test_silence_on_one_way_is_told_for_that_way() -> None:
    assert await said("UDP", udp=nothing, tcp=no_such_name) == "no answer within 0.3 s"
    assert await said("TCP", udp=no_such_name, tcp=nothing) == "no answer within 0.3 s"


@pytest.mark.parametrize("protocol", ["UDP", "TCP"])
async def test_an_answer_to_another_question_is_none(protocol: str) -> None:
    assert "no answer to what was asked" in await said(protocol, udp=of_another, tcp=of_another)


@pytest.mark.parametrize("protocol", ["UDP", "TCP"])
async def test_a_closed_port_is_told(protocol: str) -> None:
    async with name_server(udp=nothing, tcp=nothing) as port:
        pass
    told = await ask("127.0.0.1", protocol, "valkey", timeout_s=0.3, port=port)
    assert told.startswith("ConnectionRefusedError")


async def test_a_name_server_on_the_link_is_asked_through_its_interface() -> None:
    """There is none at this address; without an interface the system would refuse to try."""
    told = await ask("fe80::1%lo", "UDP", "valkey", timeout_s=0.1)
    assert told
    assert "Invalid argument" not in told


def test_a_question_is_as_rfc_1035_has_it() -> None:
    assert question("ab.c.", 0x1234) == bytes.fromhex("1234 0100 0001 0000 0000 0000") + b"\2ab\1c\0\0\1\0\1"
    assert answers(no_such_name(question("a", 5)), 5)
    assert not answers(question("a", 5), 5), "its own question, sent back"
    assert not answers(b"\0\5", 5)
    for name in ("a..b", "x" * 64):
        with pytest.raises(ValueError, match=r"label|DNS"):
            question(name, 1)


def test_resolv_conf_as_kubelet_and_others_write_it() -> None:
    text = "# x\nsearch sao.svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions timeout:1 ndots:5\n"
    found = resolver(text)
    assert found == Resolver(["10.96.0.10"], ["sao.svc.cluster.local", "cluster.local"], 5)
    assert found.first("rollout-0.rollout") == "rollout-0.rollout.sao.svc.cluster.local"
    assert found.first("a.b.c.d.example.com") == "a.b.c.d.example.com"
    assert found.first("valkey.example.com.") == "valkey.example.com.", "a name that ends in a dot is whole"
    plain = resolver("domain lan\nnameserver 1.1.1.1\nnameserver ::1\nnameserver 2.2.2.2\nnameserver 3.3.3.3\n")
    assert (plain.servers, plain.first("nas"), plain.first("a.b")) == (["1.1.1.1", "::1", "2.2.2.2"], "nas.lan", "a.b")
    assert resolver("") == Resolver([], [], 1)


def test_only_names_that_the_machine_does_not_know_itself_are_asked_of_a_server() -> None:
    hosts = "127.0.0.1 localhost\n10.0.0.1 one Two # three\n"
    given = ["valkey", "localhost", "two", "three", "10.1.2.3", "[::1]", "", "valkey"]
    assert asked_of_a_server(given, hosts) == ["valkey", "three"]


async def test_what_a_name_leads_to_and_why_nowhere() -> None:
    here, nowhere = await look_up(["localhost", "no-such-name.invalid"], timeout_s=5)
    assert "127.0.0.1" in here.addresses
    assert nowhere.addresses == ()
    assert nowhere.problem
    assert await look_up([], timeout_s=1) == []
