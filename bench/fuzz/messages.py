"""Requests to ingest: whole ones, and what fuzzing makes of them. A seed gives the same call each time, save for ids.

A distorted request may still be whole (a strange worker's name, a field that nobody knows): `fault` tells what the
service has to find, and with nothing to find it must be taken.
"""

from __future__ import annotations

import random
import string
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from sao.ids import uuid7_unix_ms
from sao.invariants import Limits, routing_violations, violations
from sao.v1 import ingest_pb2 as pb
from sao.v1 import trajectory_pb2
from tests.support.trajectories import MUTATIONS, VERSIONS, good, routed_experts

SERVICE = "/sao.v1.TrajectoryIngestService"
HORIZON_H = 24
SKEW_H = 1


@dataclass(frozen=True)
class Call:
    """One call, or one conversation, with the method of this path."""

    seed: int
    kind: str
    path: str
    items: Sequence[bytes]
    stream: bool = False
    token: str | None = "right"
    timeout_s: float = 20.0


def fault(data: bytes, limits: Limits) -> str:
    """What is wrong with these bytes as a request to publish; nothing when ingest must take them."""
    try:
        request = pb.PublishRequest.FromString(data)
    except DecodeError:
        return "undecodable"
    trajectory = request.trajectory
    found = violations(trajectory, limits, VERSIONS) + routing_violations(trajectory, request.routed_experts, limits)
    if found:
        return found[0].code.value
    age_h = (time.time_ns() // 1_000_000 - uuid7_unix_ms(trajectory.id)) / 3_600_000
    return "" if -SKEW_H <= age_h <= HORIZON_H else "age"


def whole(rng: random.Random, limits: Limits) -> pb.PublishRequest:
    """A request that ingest takes."""
    trajectory = good(rng, limits)
    trajectory.id, trajectory.task_payload_json = new_id(rng), '{"truth": "+0004"}'
    record = routed_experts(rng, trajectory, limits.routing) if limits.routing is not None else b""
    return pb.PublishRequest(trajectory=trajectory, routed_experts=record)


def new_id(rng: random.Random, ahead_h: float = 0.0) -> str:
    """A UUIDv7 whose random bits come from `rng`."""
    ms = int(time.time() * 1000 + ahead_h * 3_600_000) % 2**48
    return str(UUID(int=ms << 80 | 0x7 << 76 | rng.getrandbits(12) << 64 | 0b10 << 62 | rng.getrandbits(62)))


# --- distortions of a message ---------------------------------------------------------------------------------

_INTEGERS = (0, 1, -1, 7, 2**7, 2**31 - 1, -(2**31), 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 3.4e38, -3.4e38, float("nan"), float("inf"), float("-inf"))
_DOUBLES = (*_FLOATS, 5e-324, 1.7e308, -1.7e308)
_BOUNDS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}
_STRINGS = (
    "",
    " ",
    "\x00",
    "\n\r\t\x1b[31m",
    "0-1",
    "-1",
    "9" * 5000,
    "null",
    "{}",
    '{"a":' * 20_000,
    '{"expected": 1e999, "a": NaN, "b": ' + "9" * 6000 + "}",
    '{"a": "\\ud800"}',
    "../../../../etc/passwd",
    "%s%n%x" * 20,
    "\U0001f4a5" * 300,
    "\u202e\ufeff\ufffe\u0000",
    "x" * 70_000,
    VERSIONS[0],
)


def field(message: Message, rng: random.Random) -> None:
    """Give one field, anywhere in the message, a value from the edge of its type, or none, or too many."""
    node = rng.choice(list(_nodes(message)))
    descriptor: Any = rng.choice(node.DESCRIPTOR.fields)
    if descriptor.is_repeated:
        _repeated(getattr(node, descriptor.name), descriptor, rng)
    elif descriptor.type == FieldDescriptor.TYPE_MESSAGE:
        node.ClearField(descriptor.name)
        if rng.random() < 0.5:
            getattr(node, descriptor.name).SetInParent()
    else:
        setattr(node, descriptor.name, _extreme(descriptor, rng))


def _nodes(message: Message) -> Iterator[Message]:
    yield message
    for descriptor, value in message.ListFields():
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            for child in value if descriptor.is_repeated else [value]:
                yield from _nodes(child)


def _repeated(values: Any, descriptor: FieldDescriptor, rng: random.Random) -> None:  # noqa: ANN401 - of any type
    how = rng.randrange(4)
    if how == 0 or not values:
        del values[:]
    elif how == 1:
        del values[rng.randrange(len(values))]
    elif how == 2:
        values.extend([values[rng.randrange(len(values))]] * rng.choice([1, 3, 2000]))
    elif descriptor.type == FieldDescriptor.TYPE_MESSAGE:
        values.add()
    else:
        values[rng.randrange(len(values))] = _extreme(descriptor, rng)


def _extreme(descriptor: FieldDescriptor, rng: random.Random) -> object:
    if bounds := _BOUNDS.get(descriptor.type):
        low, high = bounds
        return rng.choice([number for number in _INTEGERS if low <= number <= high])
    if descriptor.type == FieldDescriptor.TYPE_FLOAT:
        return rng.choice(_FLOATS)
    if descriptor.type == FieldDescriptor.TYPE_DOUBLE:
        return rng.choice(_DOUBLES)
    if descriptor.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(_STRINGS)
    return rng.randbytes(rng.choice([0, 1, 100, 5000]))


def invariant(message: pb.PublishRequest, rng: random.Random, limits: Limits) -> None:
    """Break one invariant by name."""
    name = rng.choice([name for name in MUTATIONS if name != "too_large"])
    MUTATIONS[name][1](message.trajectory, rng, limits)


def age(message: pb.PublishRequest, rng: random.Random, _limits: Limits) -> None:
    """An id from long ago, from the far future, or just within what is allowed."""
    message.trajectory.id = new_id(rng, rng.choice([-(10**6), -1000, -25, -23, 0.5, 2, 30, 10**6, 10**9]))


def routes(message: pb.PublishRequest, rng: random.Random, _limits: Limits) -> None:
    """A record of routed experts that is cut, lengthened, of other experts, or there where none may be."""
    record = message.routed_experts
    message.routed_experts = rng.choice(
        [b"", record[:-1], record + b"\x00", rng.randbytes(len(record)), b"\xff" * len(record), b"\x00" * 100_000]
    )


# --- distortions of bytes -------------------------------------------------------------------------------------


def flipped(data: bytes, rng: random.Random) -> bytes:
    """One to eight bits the other way."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 8) if damaged else 0):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def cut(data: bytes, rng: random.Random) -> bytes:
    """The beginning only."""
    return data[: rng.randrange(len(data) + 1)]


def spliced(data: bytes, rng: random.Random) -> bytes:
    """A slice gone, doubled, overwritten, or random bytes in between."""
    first, last = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    middle = rng.choice([b"", data[first:last] * 2, b"\xff" * (last - first), rng.randbytes(rng.randint(1, 40))])
    return data[:first] + middle + data[last:]


def garbage(_data: bytes, rng: random.Random) -> bytes:
    """Nothing, or random bytes."""
    return rng.randbytes(rng.choice([0, 1, 2, 10, 100, 2000]))


def unknown(data: bytes, rng: random.Random) -> bytes:
    """Fields that nobody knows, of every wire type, the forbidden ones too, and groups in groups."""
    number = rng.choice([3, 15, 99, 19_000, 2**29 - 1, 0])
    extra = b""
    for _ in range(rng.randint(1, 3)):
        wire = rng.randrange(8)
        body = {0: _varint(rng.getrandbits(64)), 1: rng.randbytes(8), 5: rng.randbytes(4)}.get(wire, b"")
        if wire == 2:
            size = rng.choice([0, 5, 300])
            body = _varint(rng.choice([size, size, 2**31, 2**63])) + rng.randbytes(size)
        extra += _varint(number << 3 | wire) + body
    nested = b"\x0b" * rng.choice([1, 101, 20_000])
    return data + rng.choice([extra, extra, nested, nested + b"\x0c" * len(nested)])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


_OF_MESSAGES: Sequence[Callable[[pb.PublishRequest, random.Random, Limits], None]] = (
    invariant,
    lambda message, rng, _: field(message, rng),
    age,
    routes,
)
_OF_BYTES: Sequence[Callable[[bytes, random.Random], bytes]] = (flipped, cut, spliced, garbage, unknown)


def publication(rng: random.Random, limits: Limits) -> tuple[str, bytes]:
    """A request to publish with one to three distortions, and their names."""
    message, names = whole(rng, limits), []
    of_messages = rng.choices(range(len(_OF_MESSAGES)), weights=[4, 6, 1, 1], k=rng.choice([0, 1, 1, 1, 2, 3]))
    for index in sorted(set(of_messages)):  # `invariant`, once and first: it needs a whole message to break
        _OF_MESSAGES[index](message, rng, limits)
        names.append(("invariant", "field", "age", "routes")[index])
    data = message.SerializeToString()
    if not names or rng.random() < 0.1:
        distort = rng.choices(_OF_BYTES, weights=[4, 2, 4, 1, 3])[0]
        data = distort(data, rng)
        names.append(distort.__name__)
    return "+".join(sorted(set(names))), data


# --- calls ----------------------------------------------------------------------------------------------------


def call(seed: int, limits: Limits) -> Call:
    """The fuzzed call of this seed."""
    rng = random.Random(seed)
    return rng.choices(_CALLS, weights=_WEIGHTS)[0](seed, rng, limits)


def _publish(seed: int, rng: random.Random, limits: Limits) -> Call:
    kind, data = publication(rng, limits)
    return Call(seed, kind, f"{SERVICE}/Publish", [data])


def _stream(seed: int, rng: random.Random, limits: Limits) -> Call:
    items = [publication(rng, limits)[1] for _ in range(rng.randint(0, 6))]
    return Call(seed, "stream", f"{SERVICE}/PublishStream", items, stream=True)


def _lease(seed: int, rng: random.Random, _limits: Limits) -> Call:
    return _about_leases(seed, rng, "LeasePrompts", pb.LeasePromptsRequest(worker_id="fuzz", max_leases=1))


def _renew(seed: int, rng: random.Random, _limits: Limits) -> Call:
    ids = [f"{rng.randrange(50)}-{rng.randint(1, 3)}" for _ in range(rng.choice([0, 1, 5, 100]))]
    return _about_leases(seed, rng, "RenewLeases", pb.RenewLeasesRequest(worker_id="fuzz", lease_ids=ids))


def _about_leases(seed: int, rng: random.Random, method: str, message: Message) -> Call:
    field(message, rng)
    data = message.SerializeToString()
    if rng.random() < 0.5:
        data = rng.choice(_OF_BYTES)(data, rng)
    return Call(seed, method, f"{SERVICE}/{method}", [data])


def _stranger(seed: int, rng: random.Random, limits: Limits) -> Call:
    """Whole, but without the right token."""
    token = rng.choice([None, "", "wrong", "right ", "x" * 3000, "".join(rng.choices(string.printable[:94], k=40))])
    stream, items = rng.random() < 0.3, [whole(rng, limits).SerializeToString()]
    path = f"{SERVICE}/{'PublishStream' if stream else 'Publish'}"
    return Call(seed, "stranger", path, items, stream=stream, token=token)


def _nowhere(seed: int, rng: random.Random, limits: Limits) -> Call:
    """Whole, to a method that does not exist."""
    path = rng.choice([f"{SERVICE}/Drop", "/sao.v1.Other/Publish", "/", "//", f"{SERVICE}/", f"{SERVICE}/Publish/x"])
    return Call(seed, "nowhere", path, [whole(rng, limits).SerializeToString()])


def _hasty(seed: int, rng: random.Random, limits: Limits) -> Call:
    """Malformed, from a client that does not wait for the answer."""
    message = whole(rng, limits)
    invariant(message, rng, limits)
    return Call(seed, "hasty", f"{SERVICE}/Publish", [message.SerializeToString()], timeout_s=rng.uniform(0.0, 0.003))


def _huge(seed: int, rng: random.Random, limits: Limits) -> Call:
    """Past the limit of a trajectory, and past that of any message."""
    message = whole(rng, limits)
    message.trajectory.task_payload_json = '{"x": "' + "x" * int(limits.max_bytes * rng.choice([1, 1.5, 3, 8])) + '"}'
    return Call(seed, "huge", f"{SERVICE}/Publish", [message.SerializeToString()])


_CALLS = (_publish, _stream, _lease, _renew, _stranger, _nowhere, _hasty, _huge)
_WEIGHTS = (70, 6, 8, 8, 3, 1, 2, 0.1)


def raw(seed: int) -> bytes:
    """What other protocols, and none, would write to the port."""
    rng = random.Random(seed)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    frame = rng.randrange(2**14).to_bytes(3, "big") + rng.randbytes(6)
    return rng.choice(
        [
            rng.randbytes(rng.choice([1, 50, 4000])),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
            preface[: rng.randrange(len(preface))],
            preface + rng.randbytes(200),
            preface + settings + frame + rng.randbytes(100),
            preface + settings * 200,
            preface + settings + b"\xff\xff\xff\x01\x04\x00\x00\x00\x01" + rng.randbytes(2000),
        ]
    )


def trajectory_id(data: bytes) -> str:
    """The id in these bytes; empty when they are no request."""
    try:
        trajectory: trajectory_pb2.Trajectory = pb.PublishRequest.FromString(data).trajectory
    except DecodeError:
        return ""
    return trajectory.id
