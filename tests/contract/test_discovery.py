"""The discovery boundary: in-memory twin, the run file's list, DNS with a scripted and with the system's resolver."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from services.weights.discovery.base import Discovery, DiscoveryError, Located
from services.weights.discovery.dns import DnsDiscovery
from services.weights.discovery.memory import MemoryDiscovery
from services.weights.discovery.static import StaticDiscovery


@dataclass
class Rig:
    """A discovery, and what only a test does to it."""

    discovery: Discovery
    set: Callable[[Sequence[str]], None]
    silence: Callable[[], None]


class Resolver:
    """A name server that a test writes."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.answers = True

    def __call__(self, name: str, port: int) -> Sequence[str]:
        if not self.answers:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self.addresses

    def set(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)

    def silence(self) -> None:
        self.answers = False


@pytest.fixture(params=["memory", "dns"])
def rig(request: pytest.FixtureRequest) -> Rig:
    if request.param == "memory":
        twin = MemoryDiscovery()

        def fill(addresses: Sequence[str]) -> None:
            twin.addresses = list(addresses)

        def silence() -> None:
            twin.answers = False

        return Rig(twin, fill, silence)
    resolver = Resolver()
    return Rig(DnsDiscovery("engines", 30000, deadline_s=5.0, resolve=resolver), resolver.set, resolver.silence)


@pytest.fixture(params=["memory", "dns", "static", "system"])
def found(request: pytest.FixtureRequest, rig: Rig) -> Discovery:
    """Any of them, with engines."""
    if request.param == "static":
        return StaticDiscovery(["http://b:1", "http://a:1/"])
    if request.param == "system":
        return DnsDiscovery("localhost", 30000, deadline_s=5.0)
    rig.set(["10.0.0.7", "10.0.0.5"])
    return rig.discovery


async def test_ids_are_unique_and_the_answer_repeats(found: Discovery) -> None:
    first, again = await found.look(), await found.look()
    assert first
    assert list(first) == list(again)
    assert len({located.engine_id for located in first}) == len({located.url for located in first}) == len(first)


async def test_an_address_keeps_its_id_whoever_comes_and_goes(rig: Rig) -> None:
    rig.set(["10.0.0.7"])
    (alone,) = await rig.discovery.look()
    rig.set(["10.0.0.9", "10.0.0.7", "10.0.0.5", "10.0.0.7"])
    three = await rig.discovery.look()
    assert [located for located in three if located == alone] == [alone]
    assert len(three) == 3, "an address that is named twice is one engine"
    assert list(three) == sorted(three)
    rig.set(["10.0.0.9"])
    assert alone not in await rig.discovery.look()


async def test_no_answer_is_never_an_empty_one(rig: Rig) -> None:
    rig.set(["10.0.0.7"])
    await rig.discovery.look()
    rig.silence()
    with pytest.raises(DiscoveryError):
        await rig.discovery.look()


async def test_addresses_of_both_kinds_become_urls() -> None:
    resolver = Resolver()
    resolver.set(["fd00::1:5", "10.0.0.10", "10.0.0.9", "fe80::1%eth0"])
    assert await DnsDiscovery("engines", 30000, deadline_s=5.0, resolve=resolver).look() == [
        Located("engine-10-0-0-9", "http://10.0.0.9:30000"),
        Located("engine-10-0-0-10", "http://10.0.0.10:30000"),
        Located("engine-fd00--1-5", "http://[fd00::1:5]:30000"),
        Located("engine-fe80--1", "http://[fe80::1]:30000"),
    ]


@pytest.mark.parametrize("addresses", [[], ["engine-a"]])
async def test_a_name_without_addresses_is_an_error(addresses: list[str]) -> None:
    resolver = Resolver()
    resolver.set(addresses)
    with pytest.raises(DiscoveryError, match=r"engine\.dns: engines .*expected"):
        await DnsDiscovery("engines", 1, deadline_s=5.0, resolve=resolver).look()


async def test_a_name_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(DiscoveryError, match=r"engine\.dns: no-such-engine\.invalid"):
        await DnsDiscovery("no-such-engine.invalid", 1, deadline_s=5.0).look()


@pytest.fixture
def hanging() -> Iterator[tuple[Callable[[str, int], Sequence[str]], list[str]]]:
    """A resolver that does not answer before the test ends, and the names it was asked for."""
    end, asked = threading.Event(), list[str]()

    def resolve(name: str, port: int) -> Sequence[str]:
        asked.append(name)
        end.wait(30)
        return []

    yield resolve, asked
    end.set()


async def test_a_hanging_resolver_ends_at_the_deadline_and_is_asked_once(
    hanging: tuple[Callable[[str, int], Sequence[str]], list[str]],
) -> None:
    resolve, asked = hanging
    discovery = DnsDiscovery("engines", 1, deadline_s=0.02, resolve=resolve)
    for _ in range(3):
        with pytest.raises(DiscoveryError, match=r"not resolved within 0\.02 s"):
            await discovery.look()
    assert asked == ["engines"], "one thread hangs, not one for each look"
