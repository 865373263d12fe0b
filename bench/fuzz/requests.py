"""HTTP requests to the REST services, byte by byte: the proper ones of their OpenAPI documents, and what fuzzing makes
of them. A seed gives the same request each time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TELEMETRY = ("/metrics", "/healthz", "/readyz", "/", "/openapi.json")


@dataclass(frozen=True)
class Route:
    """What a service offers."""

    method: str
    path: str


@dataclass
class Request:
    """One request, and its bytes as `encode` writes them."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    version: bytes = b"HTTP/1.1"
    length: str | None = "right"
    """Of Content-Length; `right`, a text of its own, or none at all."""

    def encode(self) -> bytes:
        """Start line, headers, body."""
        lines = [b"%s %s %s" % (self.method.encode(), self.path.encode("utf-8", "surrogateescape"), self.version)]
        lines += [name + b": " + value for name, value in self.headers]
        if self.length is not None and (self.body or self.length != "right"):
            size = str(len(self.body)) if self.length == "right" else self.length
            lines.append(b"Content-Length: " + size.encode())
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


def routes_of(openapi: Mapping[str, Any]) -> list[Route]:
    """Every route of the document, and those for telemetry, which stand in none."""
    found = [Route(method.upper(), path) for path, methods in openapi["paths"].items() for method in methods]
    return sorted({*found, *(Route("GET", path) for path in TELEMETRY)}, key=lambda route: (route.path, route.method))


def request(seed: int, routes: Sequence[Route], components: Sequence[str]) -> tuple[str, bytes]:
    """The fuzzed request of this seed and the names of its distortions; `components` are those of the task."""
    rng = random.Random(seed)
    route = rng.choice(routes)
    made = Request(route.method, route.path.replace("{version}", rng.choice(["1", "2", "999"])))
    made.headers = [(b"Host", b"fuzz"), (b"Authorization", b"Bearer right"), (b"Connection", b"close")]
    if route.method == "PUT":
        made.body = json.dumps(document(rng, components)).encode()
        made.headers.append((b"Content-Type", b"application/json"))
    names = rng.choices(list(_DISTORTIONS), weights=_WEIGHTS, k=rng.choice([1, 1, 2, 3]))
    for name in names:
        _DISTORTIONS[name](made, rng, components)
    data = made.encode()
    if rng.random() < 0.05:
        names.append("bytes")
        data = _damaged(data, rng)
    return "+".join(sorted(set(names))), data


def document(rng: random.Random, components: Sequence[str]) -> dict[str, Any]:
    """A preference that the service takes."""
    return {"name": f"p{rng.randrange(1000)}", "weights": {rng.choice(components): round(rng.uniform(0.1, 1.0), 3)}}


# --- distortions ----------------------------------------------------------------------------------------------

_TEXTS = ("", " ", "\x00", "\ud800", "ä", "\U0001f4a5", "a" * 65, "a" * 5000, "__proto__", "../x", "correct", "A", "1")
_NUMBERS = (0, -1, 1, 2**63, -(2**63) - 1, 2**1024, 1e308, -1e308, 5e-324, float("nan"), float("inf"), 0.1, True)
_LITERALS = (b"NaN", b"-Infinity", b"1e999", b"-0", b"1" * 5000, b"01", b"1.", b".5", b"0x10", b"1_000", b"+1")


def _body(made: Request, rng: random.Random, components: Sequence[str]) -> None:
    """JSON of another shape: wrong types, missing and strange keys, numbers from the edge."""
    content = document(rng, components)
    for _ in range(rng.randint(1, 3)):
        key = rng.choice(["name", "weights", "offset", "low", "high", "gates", "thresholds", *_TEXTS])
        content[key] = _value(rng, components, depth=3)
        if rng.random() < 0.2:
            content.pop(rng.choice(list(content)))
    made.body = json.dumps(content).encode()


def _value(rng: random.Random, components: Sequence[str], depth: int) -> object:
    kind = rng.randrange(6 if depth else 4)
    if kind == 0:
        return rng.choice(_NUMBERS)
    if kind == 1:
        return rng.choice(_TEXTS)
    if kind == 2:
        return rng.choice([None, True, [], {}])
    if kind == 3:
        return rng.choice(components)
    if kind == 4:
        return [_value(rng, components, depth - 1) for _ in range(rng.randint(0, 3))]
    names = [*components, *_TEXTS]
    return {rng.choice(names): _value(rng, components, depth - 1) for _ in range(rng.randint(0, 3))}


def _no_json(made: Request, rng: random.Random, components: Sequence[str]) -> None:
    """What is no JSON document, or one that no reader should follow to its end."""
    whole = json.dumps(document(rng, components)).encode()
    literal = b'{"name": "x", "weights": {"%s": %s}}' % (components[0].encode(), rng.choice(_LITERALS))
    made.body = rng.choice(
        [
            b"",
            whole[: rng.randrange(len(whole))],
            whole + whole,
            b"[" * rng.choice([50, 30_000]),
            b'{"weights":' * rng.choice([50, 5000]) + b"1" + b"}" * 50,
            literal,
            literal,
            b'{"name": "\xff\xfe"}',
            b'{"name": "\\ud800", "weights": {"\\ud800": 1}}',
            b"\xef\xbb\xbf" + whole,
            whole.decode().encode("utf-16"),
            b"name=x&weights=1",
            b"\x00" * 100,
            rng.randbytes(rng.choice([10, 5000])),
            whole[:-1] + b'  ,"name": "twice"}',
            whole[:-1] + b" " * 70_000 + b"}",
        ]
    )


def _media(made: Request, rng: random.Random, _components: Sequence[str]) -> None:
    """Another content type, or encoding."""
    kinds = (b"", b"text/plain", b"application/xml", b"application/json; charset=utf-7", b"multipart/form-data")
    encodings = (b"gzip", b"br", b"identity", b"\xff")
    made.headers = [pair for pair in made.headers if pair[0] != b"Content-Type"]
    made.headers.append((b"Content-Type", rng.choice([*kinds, b"x" * 5000, b"multipart/form-data; boundary=\xff"])))
    if rng.random() < 0.3:
        made.headers.append((b"Content-Encoding", rng.choice(encodings)))


def _method(made: Request, rng: random.Random, _components: Sequence[str]) -> None:
    """Another verb."""
    verbs = [
        "GET",
        "HEAD",
        "POST",
        "PUT",
        "PATCH",
        "DELETE",
        "OPTIONS",
        "TRACE",
        "CONNECT",
        "PROPFIND",
        "get",
        "G" * 500,
    ]
    made.method = rng.choice([*verbs, "", "GE T", "\x00", "PRI"])


def _path(made: Request, rng: random.Random, _components: Sequence[str]) -> None:
    """A path that is long, strangely encoded, or none."""
    versions = [
        "0",
        "-1",
        "1.0",
        "1e3",
        "9" * 30,
        "9" * 5000,
        "%00",
        "%ff",
        "%31",
        "１",
        "null",
        "1%2f2",
        " ",
        "1;x",
        "0x1",
    ]
    strange = [
        "*",
        "",
        "/" * 500,
        "/..%2f..",
        "/v1/%zz",
        "//v1/preferences",
        "http://other/v1/versions",
        "/\udcff\udcfe",
    ]
    long = ["/" + "a" * 20_000, made.path + "?" + "q=1&" * 5000, made.path + "/" * 3000, made.path + "?%ff=%zz#x"]
    made.path = rng.choice(
        [f"/v1/preferences/{rng.choice(versions)}", rng.choice([*strange, "/\udcff\udcfe"]), rng.choice(long)]
    )


def _conditions(made: Request, rng: random.Random, _components: Sequence[str]) -> None:
    """If-Match, If-None-Match and the token, not as they should be."""
    tags = (b'"1"', b'"999999999999999"', b'"' + b"9" * 400 + b'"', b"*", b"1", b'W/"1"', b'"\xff"', b"", b'"1", "2"')
    name = rng.choice([b"If-Match", b"If-Match", b"If-None-Match"])
    made.headers.append((name, rng.choice(tags)))
    if rng.random() < 0.3:
        wrong = rng.choice(
            [b"", b"Bearer", b"Bearer wrong", b"Basic right", b"Bearer \xff\xfe", b"Bearer " + b"x" * 9000]
        )
        made.headers[1] = (b"Authorization", wrong)


def _headers(made: Request, rng: random.Random, _components: Sequence[str]) -> None:
    """Too many, too long, doubled, empty, of strange bytes; upgrades to what is not served."""
    made.headers += rng.choice(
        [
            [(b"X-%d" % number, b"y") for number in range(rng.choice([90, 400]))],
            [(b"X-Long", b"x" * rng.choice([7000, 70_000]))],
            [(b"X-Bytes", bytes(range(128, 256)))],
            [(b"X-Nul", b"a\x00b")],
            [(b"", b"nameless")],
            [(b"X Space", b"y"), (b"\xff\xfe", b"z")],
            [(b"Host", b"twice"), (b"Host", b"")],
            [(b"X-Folded", b"a\r\n b"), (b"X-Bare", b"a\nb: c")],
            [(b"Upgrade", b"websocket"), (b"Connection", b"Upgrade"), (b"Sec-WebSocket-Version", b"13")],
            [
                (b"Upgrade", b"websocket"),
                (b"Connection", b"Upgrade"),
                (b"Sec-WebSocket-Version", b"13"),
                (b"Sec-WebSocket-Key", b"dGhlIHNhbXBsZSBub25jZQ=="),
            ],
            [(b"Upgrade", b"h2c"), (b"HTTP2-Settings", b"AAMAAABkAAQAAP__")],
            [(b"Expect", rng.choice([b"100-continue", b"miracles"]))],
            [(b"X-Forwarded-For", b"\xff, ,,"), (b"Forwarded", b"for=;;;"), (b"X-Forwarded-Proto", b"ftp")],
            [(b"Range", b"bytes=5-1"), (b"Accept", b"\xff/*;q=nan"), (b"Cookie", b"=;=;\x01")],
        ]
    )


def _framing(made: Request, rng: random.Random, _components: Sequence[str]) -> None:
    """A body that is longer or shorter than it says, or in chunks that are none."""
    size = len(made.body)
    made.length = rng.choice([None, str(size + 1000), str(max(size - 5, 0)), "-1", "x", "9" * 30, "0", "1,2", ""])
    if rng.random() < 0.5:
        made.headers.append((b"Transfer-Encoding", rng.choice([b"chunked", b"gzip, chunked", b"identity", b"\xff"])))
        chunk = b"%x\r\n%s\r\n" % (size, made.body)
        made.body = rng.choice(
            [chunk + b"0\r\n\r\n", chunk, b"zz\r\n", b"ffffffffffffffffff\r\n", b"-5\r\nx\r\n", chunk * 3]
        )
        made.length = rng.choice([None, made.length])


def _version(made: Request, rng: random.Random, _components: Sequence[str]) -> None:
    """Another HTTP, or none."""
    made.version = rng.choice([b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b"", b"HTTP/1.1 x"])


_DISTORTIONS = {
    "body": _body,
    "no_json": _no_json,
    "media": _media,
    "method": _method,
    "path": _path,
    "conditions": _conditions,
    "headers": _headers,
    "framing": _framing,
    "version": _version,
}
_WEIGHTS = (5, 5, 2, 3, 5, 3, 4, 3, 1)


def _damaged(data: bytes, rng: random.Random) -> bytes:
    first, last = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    flipped = bytearray(data)
    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return rng.choice(
        [data[:first], data[first:last], bytes(flipped), rng.randbytes(300), data.replace(b"\r\n", b"\n")]
    )
